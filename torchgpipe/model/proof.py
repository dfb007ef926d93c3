"""The comparison of a pipeline with its own layers, run one by one.

    layers, rows together     all rows at once                         ─┐ equal, or a layer couples the rows
    layers, rows apart        micro-batch by micro-batch               ─┤
    pipeline                  forward and backward; and, with a loss,  ─┘ equal, or the pipeline has lost something
                              a step

Where layers draw random numbers, everything runs in evaluation: a pipeline draws in another order. A batch norm couples
the rows in training, so rows together run in evaluation. Nothing is left behind: gradients go to stand-ins of the
parameters, and `untouched` puts back the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.device import bring
from torchgpipe.devices.torch_internals import BatchNormBase, pytree
from torchgpipe.devices.typing import Leaf
from torchgpipe.model.comparison import Comparison, cotangent, largest_of
from torchgpipe.model.loss import MeanLoss
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition
from torchgpipe.model.untouched import Buffers, in_mode, untouched
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import generator_states
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["SequentialProof"]


_DRAWS = (
    "layers draw random numbers in evaluation, too, and a pipeline draws in another order, so nothing can be compared; "
    "let them draw in training only, or compare a model without them"
)


class _Outcome(NamedTuple):
    """What a mini-batch has computed: its output without a graph, and a loss, by path; changed buffers, gradients."""

    outputs: dict[str, Tensor]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


class SequentialProof:
    """The comparison of a pipeline with its own layers on one mini-batch.

    Args:
        model: the pipeline
        partitions: returns the layers of each partition
        devices: the device of each partition
        batches: returns new micro-batches, at most so many
        gather: joins the outputs of micro-batches
        pipeline: runs the mini-batch through the pipeline, forward
        around: the extent of a mini-batch of so many micro-batches
        loss: returns the loss of a step; None to compare no step
        step: runs a step
    """

    def __init__(
        self,
        model: nn.Module,
        partitions: Callable[[], Sequence[Partition]],
        devices: Sequence[torch.device],
        *,
        chunks: int,
        batches: Callable[[int], list[Batch]],
        gather: Callable[[list[Batch]], Any],
        pipeline: Callable[[], Any],
        around: Callable[[int, nn.Module], AbstractContextManager[None]],
        loss: Callable[[], MeanLoss] | None,
        step: Callable[[], Any],
    ) -> None:
        self._model, self._partitions, self._devices = model, partitions, devices
        self._chunks, self._batches, self._gather = chunks, batches, gather
        self._pipeline, self._around, self._loss, self._step = pipeline, around, loss, step
        #: The gradients of the leaves of the output, for each micro-batch.
        self._cotangents: list[list[Leaf]] = []
        #: Whether random numbers were drawn in the last run.
        self._draws = False

    def run(self) -> Comparison:
        """Run everything, and return the comparison."""
        model, training = self._model, self._model.training
        with torch.inference_mode(False), torch.enable_grad(), _stand_ins(model) as parameters:
            apart = self._layers_apart(parameters)
            training = training and not self._draws
            with in_mode(model, training):
                apart = self._layers_apart(parameters) if self._draws else apart
                comparison = Comparison(_epsilon(model, apart))
                if self._draws:
                    comparison.note("random numbers", _DRAWS)
                    return comparison
                _compare(comparison, "", apart, self._piped(parameters))
                if self._loss is not None:
                    _compare(comparison, " of a step", self._layers_stepped(parameters), self._stepped(parameters))
            couples = training and any([isinstance(layer, BatchNormBase) for layer in model.modules()])
            if self._chunks > 1:
                with in_mode(model, training and not couples):
                    _compare_rows(comparison, self._evaluated(1), self._evaluated(self._chunks))
        return comparison

    # ---------------------------------------------------------------------------------------------------------- layers

    def _layers_apart(self, parameters: dict[str, Tensor]) -> _Outcome:
        """Run and differentiate the layers, one micro-batch after the other."""
        outputs, self._cotangents = [], []
        with self._noting(parameters) as noted, self._around(self._chunks, self._model):
            for i, batch in enumerate(self._batches(self._chunks)):
                output = self._layers(batch)
                seeds = [None if leaf is None else cotangent(f"{k} {i}", leaf) for k, leaf in enumerate(output.leaves)]
                _differentiate(output.leaves, seeds)
                outputs.append(
                    output.replace(tuple([leaf if leaf is None else leaf.detach() for leaf in output.leaves]))
                )
                self._cotangents.append(seeds)
        return noted(self._gather(outputs))

    def _layers_stepped(self, parameters: dict[str, Tensor]) -> _Outcome:
        assert self._loss is not None
        loss, batches = self._loss(), self._batches(self._chunks)
        loss.total = loss.prepare(batches)
        with self._noting(parameters) as noted, self._around(len(batches), self._model):
            for i, batch in enumerate(batches):
                share = loss.finish(i, self._layers(batch))
                _differentiate([share], [torch.ones_like(share)])
        return noted({"loss": loss.sum()})

    def _evaluated(self, chunks: int) -> dict[str, Tensor]:
        """Return the output of the layers without a graph."""
        with untouched(self._model), self._around(chunks, self._model):
            return _named(self._gather([self._layers(batch) for batch in self._batches(chunks)]))

    def _layers(self, batch: Batch) -> Batch:
        """Run all layers on a micro-batch, from device to device."""
        tracker = SkipTracker()
        with tracker:
            for partition, device in zip(self._partitions(), self._devices):
                batch = batch.replace(tuple([leaf if leaf is None else bring(leaf, device) for leaf in batch.leaves]))
                for key, skip in tracker.skips.items():
                    tracker.skips[key] = skip if skip is None else bring(skip, device)
                batch = type(batch).of(batch.pass_to(partition), "the output of a layer")
        return batch

    # -------------------------------------------------------------------------------------------------------- pipeline

    def _piped(self, parameters: dict[str, Tensor]) -> _Outcome:
        """Run the pipeline forward, and differentiate its output."""
        with self._noting(parameters) as noted:
            output = self._pipeline()
            columns = [None if None in column else torch.cat(column) for column in zip(*self._cotangents)]
            _differentiate(pytree.tree_leaves(output), columns)
        return noted(output)

    def _stepped(self, parameters: dict[str, Tensor]) -> _Outcome:
        with self._noting(parameters) as noted:
            result = self._step()
        return noted({"loss": result[0] if isinstance(result, tuple) else result})

    # --------------------------------------------------------------------------------------------------------- outcome

    @contextmanager
    def _noting(self, parameters: dict[str, Tensor]) -> Iterator[Callable[[Any], _Outcome]]:
        """Leave nothing behind of a ``with`` block, and provide a function that returns its outcome, given outputs."""
        buffers: dict[str, Tensor] = {}
        with untouched(self._model):
            before, states = Buffers(self._model), generator_states(self._devices)
            yield lambda outputs: _Outcome(
                _named(outputs), buffers, {name: _take(parameter) for name, parameter in parameters.items()}
            )
            buffers.update(before.changed())
            self._draws = generator_states(self._devices) != states


def _compare(comparison: Comparison, what: str, plain: _Outcome, ours: _Outcome) -> None:
    """Compare the pipeline with its layers."""
    floor = largest_of(plain.gradients.values())
    kinds: list[tuple[str, Mapping[str, Tensor | None], Mapping[str, Tensor | None]]] = [
        ("output", plain.outputs, ours.outputs),
        ("buffer", plain.buffers, ours.buffers),
        ("gradient of", plain.gradients, ours.gradients),
    ]
    for kind, expected, actual in kinds:
        for name in dict.fromkeys([*expected, *actual]):
            row = f"{kind} {name}{what}"
            fault = f"{row} is not that of the layers, run one by one"
            least = floor if kind == "gradient of" else 0.0
            comparison.add(row, expected.get(name), actual.get(name), fault, tolerance=comparison.tight, floor=least)


def _compare_rows(comparison: Comparison, together: dict[str, Tensor], apart: dict[str, Tensor]) -> None:
    for name, tensor in together.items():
        fault = (
            f"the output {name} of shape {tuple(tensor.shape)} is not what the rows apart give, without a pipeline "
            "either: a layer couples the rows, as by x.mean(0), or dimension 0 is not the batch (batch_first=True?)"
        )
        row = f"output {name}, rows together and apart"
        comparison.add(row, tensor, apart.get(name), fault, tolerance=comparison.loose)


def _named(value: Any) -> dict[str, Tensor]:
    leaves, _ = pytree.tree_flatten_with_path(value)
    return {pytree.keystr(path) or "value": leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)}


def _differentiate(leaves: Sequence[Leaf], grads: Sequence[Leaf]) -> None:
    pairs = [(leaf, grad) for leaf, grad in zip(leaves, grads) if leaf is not None and grad is not None]
    wanted = [(leaf, grad) for leaf, grad in pairs if leaf.requires_grad]
    if wanted:
        with Ambient().without_autocast():
            torch.autograd.backward([leaf for leaf, _ in wanted], [grad for _, grad in wanted])


def _take(parameter: Tensor) -> Tensor | None:
    grad, parameter.grad = parameter.grad, None
    return grad


def _epsilon(model: nn.Module, outcome: _Outcome) -> float:
    tensors = [*model.parameters(), *outcome.outputs.values()]
    return max(
        [torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()],
        default=0.0,
    )


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Let the layers have parameters with the same memory in a ``with`` block, whose hooks and ``.grad`` are their own.

    Provide these by name.
    """
    owned = [(layer, name, parameter) for layer in model.modules() for name, parameter in layer._parameters.items()]
    before = [
        (layer, name, parameter) for layer, name, parameter in owned if parameter is not None and not is_lazy(parameter)
    ]
    made = {
        parameter: nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad) for _, _, parameter in before
    }
    for parameter, stand_in in made.items():
        vars(stand_in).update(vars(parameter))
    try:
        for layer, name, parameter in before:
            setattr(layer, name, made[parameter])
        yield dict(model.named_parameters())
    finally:
        for layer, name, parameter in before:
            setattr(layer, name, parameter)
