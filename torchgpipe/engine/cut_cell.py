"""A cell of a step: its graph is cut from those of its neighbours, so that its backward is a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import versions
from torchgpipe.devices.typing import Leaves
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.kept import KeptGraph
from torchgpipe.engine.partition_call import PartitionCall
from torchgpipe.engine.recomputation import Recomputation
from torchgpipe.engine.record import Kind
from torchgpipe.model.microbatch import Batch
from torchgpipe.replay.seeds import LayerSeeds

__all__ = ["CutCell", "Finish", "SeededCell"]

#: Turns the output of micro-batch ``i`` into its share of the loss, of shape (1,).
Finish = Callable[[int, Batch], Tensor]


class SeededCell(Cell):
    """A cell whose layers have seeds of their own; in the last partition, its output is the loss."""

    __slots__ = ("_finish", "_seeds")

    def __init__(self, call: PartitionCall, i: int, m: int, seeds: LayerSeeds, finish: Finish | None) -> None:
        super().__init__(call, i, m)
        self._seeds = seeds
        self._finish = finish

    def compute(self, leaves: Leaves) -> Leaves:
        """Run the layers, and the loss function behind the last ones."""
        call, device = self.call, self.call.device
        with self._seeds.at(self.i, device):
            if self._finish is None:
                return super().compute(leaves)
            output = call.run_layers(self._input.replace(leaves))
        return (self._seeds.run_loss(self.i, device, self._finish, output),)

    @contextmanager
    def differentiating(self, kind: Kind = "backward") -> Iterator[None]:
        """Let layers that recompute themselves draw what they have drawn, in a ``with`` block; see `Cell`."""
        # Around the graph only: a second run holds norms, and waits for the generator within.
        with self._seeds.backward(), super().differentiating(kind):
            yield


class CutCell:
    """A cell whose inputs are the leaves of its graph.

    Args:
        cell: the cell
        recompute: whether to keep the inputs only, and to run again at backward
    """

    __slots__ = ("_cell", "_leaves", "_needed", "_recompute", "_rest", "_run", "_versions")

    def __init__(self, cell: Cell, *, recompute: bool) -> None:
        self._cell = cell
        self._recompute = recompute
        self._run: Recomputation | KeptGraph | None = None
        #: The input, if the cell runs again.
        self._leaves: Leaves = ()
        #: For each leaf of the input, whether it requires grad.
        self._needed: list[bool] = []
        self._rest: Callable[[], Any] | None = None

    @property
    def recomputes(self) -> bool:
        """Whether the cell will run again."""
        return isinstance(self._run, Recomputation)

    def run(self, leaves: Leaves, *, backward: bool) -> Leaves:
        """Run the cell, and return its outputs without their graph; ``requires_grad`` tells which need gradients.

        Args:
            leaves: the leaves of the input
            backward: whether a backward follows
        """
        self._needed = [leaf is not None and leaf.requires_grad for leaf in leaves]
        if not backward:
            with self._cell.recorded("forward"), torch.no_grad():
                return self._cell.compute(leaves)
        if self._recompute and self._cell.call.needs_grad(leaves):
            self._run, self._leaves, self._versions = Recomputation(self._cell), leaves, versions(leaves)
            with torch.no_grad():
                outputs = self._run.first_run(leaves)
            # Which outputs need a gradient is known in the second run only.
            return tuple([x if x is None else x.detach().requires_grad_(_is_continuous(x)) for x in outputs])
        self._run = KeptGraph(self._cell)
        outputs = self._run.only_run(leaves)
        return tuple([x if x is None else x.detach().requires_grad_(x.requires_grad) for x in outputs])

    def differentiate(self, grads: Leaves, *, split: bool) -> Leaves:
        """Return the gradients of the input leaves, given those of the outputs, and drop the graph.

        Args:
            grads: the gradients of the outputs
            split: whether to leave the gradients of weights to `differentiate_weights`, if that is possible
        """
        run, leaves, needed = self._run, self._leaves, self._needed
        self._run, self._leaves = None, ()
        if run is None or all([grad is None for grad in grads]):
            return tuple([None] * len(needed))
        if isinstance(run, Recomputation):
            if versions(leaves) != self._versions:
                raise RuntimeError(
                    f"{self._cell.call.where} cannot be recomputed, because its input was changed in place after it "
                    "ran, perhaps by a later layer that was given a view of it; return a copy (output.clone()), or use "
                    "checkpoint='never'"
                )
            run.second_run(leaves)
            return tuple(run.differentiate(grads, runs_again=False))
        direct = self._cell.call.direct
        if split and direct is not None and direct.adds_to_grad:
            if not any(needed):
                self._rest = partial(run.differentiate, grads, needed, keep_graph=False, kind="backward of the weights")
                return tuple([None] * len(needed))
            result = run.differentiate_inputs(grads, needed)
            if result is not None:
                self._rest = run.differentiate_weights
                return tuple(result)
        return tuple(run.differentiate(grads, needed, keep_graph=False))

    def differentiate_weights(self) -> None:
        """Run what `differentiate` has left, if anything."""
        if self._rest is not None:
            self._rest()


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
