"""The proof of a pipeline of layers: a call with its backward and, with a target, a step, beside the layers one by one.

Where layers draw random numbers in training, that is left out: a pipeline draws in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.batch.loss import Losses
from torchgpipe.batch.microbatch import Batch
from torchgpipe.devices.device import bring
from torchgpipe.devices.stream import Streams
from torchgpipe.devices.torch_internals import BatchNormBase, pytree
from torchgpipe.model.comparison import Comparison, cotangent
from torchgpipe.model.untouched import in_mode, untouched
from torchgpipe.norms.mini_batch import mini_batch
from torchgpipe.proof.leaves import Leaves
from torchgpipe.proof.proof import (
    OF_ROWS,
    Roots,
    Run,
    compare_gradients,
    differentiate,
    differing_most,
    has_nan,
    nan_error,
    take_fingerprints,
    without_zeros,
)
from torchgpipe.replay.random import generator_states
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["SequentialProof"]


@dataclass(eq=False)
class SequentialProof:
    """The comparison of a pipeline with its own layers on one mini-batch.

    Attributes:
        model: the pipeline, a GPipe
        splits: whether the micro-batches are parts of a mini-batch
        batches: returns new micro-batches, at most so many
        gather: joins the outputs of micro-batches
        pipeline: runs the mini-batch through the pipeline, forward
        loss: returns the loss of a step of at most so many micro-batches; None to compare no step
        step: runs a step
    """

    model: Any
    splits: bool
    batches: Callable[[int], list[Batch]]
    gather: Callable[[list[Batch]], Any]
    pipeline: Callable[[], Any]
    loss: Callable[[int], Losses] | None
    step: Callable[[], Any]

    def __post_init__(self) -> None:
        parameters = [known for known in self.model.parameters() if known.is_floating_point() or known.is_complex()]
        self._comparison = Comparison(max([torch.finfo(known.dtype).eps for known in parameters], default=0.0))
        self._leaves, self._streams = Leaves(self.model.named_parameters()), Streams()
        #: The gradients of the output that backward of the pipeline begins with.
        self._seeds: list[Tensor] = []

    def run(self) -> Comparison:
        """Run everything, in training and in evaluation, and return the comparison."""
        with torch.inference_mode(False), torch.enable_grad(), self._leaves, without_zeros(self.model):
            for training in (True, False):
                with in_mode(self.model, training):
                    self._compare("" if training else " in evaluation", None, self._called)
                    if self.loss is not None:
                        self._compare(" of a step" + " in evaluation" * (not training), self.loss, self._stepped)
        return self._comparison

    def _compare(
        self, what: str, loss: Callable[[int], Losses] | None, pipeline: Callable[[], dict[str, Tensor]]
    ) -> None:
        """Compare outputs, buffers and gradients of the pipeline with those of the layers, and rows with rows apart."""
        comparison, training = self._comparison, self.model.training

        def run(count: int, scale: int = 1) -> Run:
            return self._recorded(lambda: self._layers(count, scale, None if loss is None else loss(count)))

        apart = run(self.model.chunks)
        if apart.draws:
            if training:
                comparison.skip("training, where layers draw random numbers, and a pipeline in another order")
            else:
                comparison.note("random numbers", _DRAWS)
            return
        unclear = [path for path, tensor in apart.outputs.items() if loss is None and has_nan(tensor)]
        if unclear:
            raise nan_error(unclear[0])
        norms = [child for child in self.model.modules() if isinstance(child, BatchNormBase)]
        if self.splits and not (training and (norms or apart.buffers)):
            together, rows = run(1), f"{what}, rows together and apart"
            fault = _COUPLED if loss is None else _NO_MEAN
            comparison.add_named(f"output {{}}{rows}", together.outputs, apart.outputs, fault, comparison.loose)
            name = differing_most(together.gradients, [(1.0, apart.gradients)], comparison.loose)
            if name:
                comparison.note(f"gradients{rows}", OF_ROWS.format(name))
        ours = self._recorded(pipeline)
        for kind, a, b in (("output", apart.outputs, ours.outputs), ("buffer", apart.buffers, ours.buffers)):
            row = f"{kind} {{}}{what}"
            comparison.add_named(row, a, b, f"{row} {_DIFFERS}", comparison.tight)
        faults = {name: f"gradient of {name}{what} {_DIFFERS}" for name in ours.gradients}
        compare_gradients(comparison, apart, partial(run, self.model.chunks), ours.gradients, faults, what)

    def _recorded(self, run: Callable[[], dict[str, Tensor]]) -> Run:
        """Run without a trace."""
        with untouched(self.model, self.model.devices) as changed:
            before, outputs = generator_states(self.model.devices), run()
            gradients = take_fingerprints(self._leaves.take())
            return Run(outputs, changed(), gradients, generator_states(self.model.devices) != before)

    def _layers(self, count: int, scale: int = 1, loss: Losses | None = None) -> dict[str, Tensor]:
        """Run the layers on so many micro-batches, and differentiate each."""
        batches = self.batches(count)
        outputs: list[Batch] = []
        seeds = list[list[Tensor]]()
        with mini_batch(len(batches)):
            for i, batch in enumerate(batches):
                output = self._layers_on(batch)
                leaves = [leaf for leaf in output.leaves if leaf is not None]
                if loss is not None:
                    value = loss.finish(i, output)
                    pairs = [(value, torch.full_like(value, scale))]
                else:
                    of_rows = [cotangent(f"{k} {i}", leaf) for k, leaf in enumerate(leaves)]
                    seeds.append(of_rows if count == self.model.chunks else self._seeds)
                    pairs = [(leaf, seed * scale) for leaf, seed in zip(leaves, seeds[-1])]
                self._differentiate(pairs)
                copies = [leaf if leaf is None else leaf.detach().clone() for leaf in output.leaves]
                outputs.append(output.replace(tuple(copies)))
        if loss is not None:
            return {"['loss']": loss.sum()}
        if count == self.model.chunks:
            self._seeds = [*map(torch.cat, zip(*seeds))] if self.splits else [seed for one in seeds for seed in one]
        return _named(self.gather(outputs))

    def _layers_on(self, batch: Batch) -> Batch:
        tracker = SkipTracker()
        with tracker:
            for partition, device in zip(self.model.partitions, self.model.devices):
                batch = batch.replace(tuple([leaf if leaf is None else bring(leaf, device) for leaf in batch.leaves]))
                for key, skip in tracker.skips.items():
                    tracker.skips[key] = skip if skip is None else bring(skip, device)
                with self._streams.current(device).use():  # A kernel of the user's may need its device to be current.
                    batch = type(batch).of(batch.pass_to(partition), "the output of a layer")
        return batch

    def _differentiate(self, pairs: Roots) -> None:
        roots = [(leaf, seed) for leaf, seed in pairs if leaf.requires_grad]
        self._leaves.note([leaf for leaf, _ in roots])
        differentiate(roots)

    def _called(self) -> dict[str, Tensor]:
        """Run the pipeline, and differentiate its output as that of the layers was."""
        output = self.pipeline()
        self._differentiate([*zip([leaf for leaf in pytree.tree_leaves(output) if leaf is not None], self._seeds)])
        return _named(output)

    def _stepped(self) -> dict[str, Tensor]:
        result = self.step()
        return {"['loss']": result[0] if isinstance(result, tuple) else result}


def _named(value: Any) -> dict[str, Tensor]:
    leaves, _ = pytree.tree_flatten_with_path(value)
    return {pytree.keystr(path) or "value": leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)}


_DIFFERS = "is not that of the layers, run one by one"
_DRAWS = (
    "layers draw random numbers in evaluation, too, and a pipeline draws in another order, so nothing can be compared; "
    "let them draw in training only"
)
_COUPLED = (
    "the output {} is not what the rows apart give, without a pipeline either: a layer couples the rows, as by "
    "x.mean(0), or dimension 0 is not the batch (batch_first=True?)"
)
_NO_MEAN = (
    "the loss of all rows is not that of the rows apart: loss_fn is no mean over rows or labels; give weight=, which "
    "returns the weight of a micro-batch"
)
