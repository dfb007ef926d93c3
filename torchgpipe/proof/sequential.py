"""The proof of a pipeline of layers: a call with its backward and, with a target, a step, beside the layers one by one.

Where layers draw random numbers, everything runs in evaluation: a pipeline draws in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.batch.loss import Losses
from torchgpipe.batch.microbatch import Batch
from torchgpipe.devices.device import bring
from torchgpipe.devices.stream import Streams
from torchgpipe.devices.torch_internals import parameter_like, pytree
from torchgpipe.devices.typing import Leaf
from torchgpipe.model.comparison import cotangent
from torchgpipe.model.partition import Partition
from torchgpipe.model.untouched import Buffers
from torchgpipe.model.values import copy_without_graph
from torchgpipe.norms.mini_batch import mini_batch
from torchgpipe.proof.proof import Number, PlainRun, Proof, Roots, Take, take_fingerprints
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import generator_states
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["SequentialProof"]

_DIFFERS = "is not that of the layers, run one by one"


class _StandIns(Take):
    """Parameters with the memory of those of a model, whose hooks and ``.grad`` are their own.

    Args:
        model: the model
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (layer, name, parameter)
            for layer in model.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and not is_lazy(parameter)
        ]
        self._made = {
            parameter: parameter_like(parameter, parameter.detach(), requires_grad=parameter.requires_grad)
            for *_, parameter in self._places
        }
        for parameter, stand_in in self._made.items():
            vars(stand_in).update(vars(parameter))
        self._named: dict[str, Tensor] = {}
        self._model = model

    def __enter__(self) -> _StandIns:
        for layer, name, parameter in self._places:
            setattr(layer, name, self._made[parameter])
        self._named = dict(self._model.named_parameters())
        return self

    def __exit__(self, *_: object) -> None:
        for layer, name, parameter in self._places:
            setattr(layer, name, parameter)

    def own(self) -> list[Tensor]:
        return list(self._named.values())

    def take(self) -> Iterator[tuple[str, Leaf]]:
        for name, stand_in in self._named.items():
            grad, stand_in.grad = stand_in.grad, None
            yield name, grad


class SequentialProof(Proof):
    """The comparison of a pipeline with its own layers on one mini-batch.

    Args:
        model: the pipeline
        partitions: returns the layers of each partition
        devices: the device of each partition
        batches: returns new micro-batches, at most so many
        splits: whether the micro-batches are parts of a mini-batch
        gather: joins the outputs of micro-batches
        pipeline: runs the mini-batch through the pipeline, forward
        loss: returns the loss of a step of at most so many micro-batches; None to compare no step
        step: runs a step
    """

    draws_in_another_order = True

    def __init__(
        self,
        model: nn.Module,
        partitions: Callable[[], Sequence[Partition]],
        devices: Sequence[torch.device],
        *,
        chunks: int,
        splits: bool,
        batches: Callable[[int], list[Batch]],
        gather: Callable[[list[Batch]], Any],
        pipeline: Callable[[], Any],
        loss: Callable[[int], Losses] | None,
        step: Callable[[], Any],
    ) -> None:
        count = len(batches(chunks))
        parameters = [known for known in model.parameters() if known.is_floating_point() or known.is_complex()]
        epsilon = max([torch.finfo(known.dtype).eps for known in parameters], default=0.0)
        super().__init__(model, devices, [1] * count, epsilon, splits=splits)
        self._partitions, self._chunks, self._batches, self._gather = partitions, chunks, batches, gather
        self._splits = splits
        self._streams = Streams()
        self._pipeline, self._make_loss, self._step = pipeline, loss, step
        #: The loss of a step while steps are compared.
        self._loss: Losses | None = None
        self._steps = False
        #: For each micro-batch, the gradients of the leaves of its output that backward begins with.
        self._seeds: list[list[Tensor]] = []
        self._before: list[bytes] = []

    # ---------------------------------------------------------------------------------------------------------- layers

    def run_plain(self, i: int | None) -> Batch:
        (batch,) = self._batches(1) if i is None else self._batches(self._chunks)[i : i + 1]
        tracker = SkipTracker()
        with tracker:
            for partition, device in zip(self._partitions(), self._devices):
                batch = batch.replace(tuple([leaf if leaf is None else bring(leaf, device) for leaf in batch.leaves]))
                for key, skip in tracker.skips.items():
                    tracker.skips[key] = skip if skip is None else bring(skip, device)
                with self._streams.current(device).use():  # A kernel of the user's may need its device to be current.
                    batch = type(batch).of(batch.pass_to(partition), "the output of a layer")
        return batch

    @contextmanager
    def running_plain(self) -> Iterator[Take]:
        with _StandIns(self._module) as stand_ins:
            self._before = generator_states(self._devices)
            self._loss = self._make_loss(self._chunks) if self._steps and self._make_loss is not None else None
            yield stand_ins

    def draws(self) -> bool:
        return generator_states(self._devices) != self._before

    def surround(self, count: int) -> AbstractContextManager[object]:
        return mini_batch(count)

    def tensors(self, output: Batch) -> Iterator[tuple[str, Tensor]]:
        return iter(_named(output.value).items())

    def without_graph(self, output: Batch) -> Batch:
        return output.replace(tuple([leaf if leaf is None else copy_without_graph(leaf) for leaf in output.leaves]))

    def roots(self, i: int, output: Batch) -> Roots:
        if self._loss is not None:
            share = self._loss.finish(i, output)
            return [(share, torch.ones_like(share))] if share.requires_grad else []
        pairs = [(leaf, cotangent(f"{k} {i}", leaf)) for k, leaf in enumerate(output.leaves) if leaf is not None]
        self._seeds[i:] = [[seed for _, seed in pairs]]
        return [(leaf, seed) for leaf, seed in pairs if leaf.requires_grad]

    def roots_of_rows(self, i: int | None, output: Batch) -> Roots:
        if i is not None:
            return self.roots(i, output)
        leaves = [leaf for leaf in output.leaves if leaf is not None]
        pairs = zip(leaves, map(torch.cat, zip(*self._seeds)))
        return [(leaf, seed) for leaf, seed in pairs if leaf.requires_grad and leaf.shape == seed.shape]

    def inputs(self) -> Iterator[tuple[str, Tensor]]:
        return iter(_named(self._batches(1)[0].value).items())

    def sum_losses(self) -> Tensor | None:
        return None if self._loss is None else self._loss.sum()

    # ------------------------------------------------------------------------------------------------------------ rows

    def numbers(self, i: int | None, output: Batch) -> dict[str, Tensor]:
        if self._make_loss is None:
            return {}
        loss = self._make_loss(1 if i is None else self._chunks)
        return {"loss": loss.finish(i or 0, output)}

    def compare_number(self, path: str, together: Number, apart: Sequence[Number]) -> None:
        joined = torch.stack([share.value for share in apart]).sum()
        fault = (
            f"the loss of all rows is {float(together.value):.6g}, and that of the rows apart {float(joined):.6g}, or "
            "their gradients differ: loss_fn is no mean over rows or labels; give weight=, which returns the weight of "
            "a micro-batch"
        )
        fault *= not self.fits(together, apart, [1.0] * len(apart))
        self.comparison.add_number("loss of a step, rows together and apart", together.value, joined, fault)

    def compare_outputs_of_rows(self, together: Batch, apart: list[Any], *, training: bool, draws: bool) -> None:
        fault = (
            "the output {} is not what the rows apart give, without a pipeline either: a layer couples the rows, as by "
            "x.mean(0), or dimension 0 is not the batch (batch_first=True?)"
        )
        whole, joined, loose = _named(together.value), _named(self._gather(apart)), self.comparison.loose
        self.compare_named("output {}, rows together and apart", whole, joined, fault, loose)

    # -------------------------------------------------------------------------------------------------------- pipeline

    def compare_pipeline(self, apart: PlainRun) -> None:
        outputs = self._gather([*apart.outputs])
        self._compare("", apart, _named(outputs), lambda: self._differentiated(self._pipeline()))
        if self._make_loss is not None:
            self._steps = True
            stepped = self.apart()
            assert stepped.loss is not None
            self._compare(" of a step", stepped, {"['loss']": stepped.loss}, self._stepped)

    def _compare(
        self, what: str, apart: PlainRun, outputs: Mapping[str, Tensor], run: Callable[[], dict[str, Tensor]]
    ) -> None:
        """Run the pipeline, and compare its outputs, the buffers and the gradients with those of the layers."""
        with self._untouched(), _StandIns(self._module) as stand_ins:
            buffers = Buffers(self._module)
            ours = run()
            changed = buffers.changed()
            gradients = take_fingerprints(stand_ins.take())
            gradients |= take_fingerprints(self._outside.take())
        for kind, expected, actual in (("output", outputs, ours), ("buffer", apart.buffers, changed)):
            row = f"{kind} {{}}{what}"
            self.compare_named(row, expected, actual, f"{row} {_DIFFERS}", self.comparison.tight)
        if apart.gradients is not None:
            faults = [(name, grad, f"gradient of {name}{what} {_DIFFERS}") for name, grad in gradients.items()]
            self.compare_gradients(apart.gradients, faults, what)

    def _differentiated(self, output: Any) -> dict[str, Tensor]:
        """Differentiate the output of the pipeline as that of the layers was, and return it."""
        leaves: list[Leaf] = pytree.tree_leaves(output)
        seeds = [*map(torch.cat, zip(*self._seeds))] if self._splits else [seed for one in self._seeds for seed in one]
        pairs = zip([leaf for leaf in leaves if leaf is not None], seeds)
        wanted = [(leaf, seed) for leaf, seed in pairs if leaf.requires_grad]
        if wanted:
            with Ambient().without_autocast():
                torch.autograd.backward([leaf for leaf, _ in wanted], [grad for _, grad in wanted])
        return _named(output)

    def _stepped(self) -> dict[str, Tensor]:
        result = self._step()
        return {"['loss']": result[0] if isinstance(result, tuple) else result}

    def compare_evaluation(self, outputs: list[Any]) -> None:
        plain, ours, row = _named(self._gather(outputs)), _named(self._pipeline()), "output {} in evaluation"
        self.compare_named(row, plain, ours, f"{row} {_DIFFERS}", self.comparison.tight)


def _named(value: Any) -> dict[str, Tensor]:
    leaves, _ = pytree.tree_flatten_with_path(value)
    return {pytree.keystr(path) or "value": leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)}
