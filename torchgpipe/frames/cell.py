"""A cell of frames: what micro-batch i has computed in column j, as a graph of its own.

The graph begins at imports, which stand for what earlier columns have computed, and ends at exports, which later
columns have imported:

    column 0                    column 1                      column 2
    ──► a ──────── export ┐ ┌─► Import ──► b ──── export ┐ ┌─► Import ──► loss
        └───────── export ┼─┼────────────────────────────┘ └─► Import ──┘
                          └─┘

So the backward of a cell is one pass from its exports, with the gradients that the imports of later columns have taken.
It adds to the gradients of the parameters, and takes the gradients of its own imports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.typing import Leaf
from torchgpipe.engine.function import Edge, Function, accumulate
from torchgpipe.engine.phony import get_phony
from torchgpipe.engine.record import Kind
from torchgpipe.engine.split_backward import SplitBackward

__all__ = ["Arrival", "Cell", "Export", "Import", "Recorded"]

#: Tells the listener of the mini-batch, if there is one, what runs in a ``with`` block.
Recorded = Callable[[Kind], AbstractContextManager[None]]


class Arrival:
    """The gradients of a tensor that arrive from the cells that have imported it."""

    __slots__ = ("_grads",)

    def __init__(self) -> None:
        # Added up later: the stream of the cell may have to wait for them first.
        self._grads: list[Tensor] = []

    def add(self, grad: Leaf) -> None:
        """Take a gradient that arrives."""
        if grad is not None:
            self._grads.append(grad)

    def total(self) -> Leaf:
        """Return the sum of the gradients that have arrived, and forget them."""
        grads, self._grads = self._grads, []
        return functools.reduce(torch.add, grads) if grads else None


class Export(Arrival):
    """A tensor of a cell that later columns import, or the caller gets.

    Args:
        edge: where the graph of the cell is entered

    Attributes:
        edge: where the graph of the cell is entered
    """

    __slots__ = ("edge",)

    def __init__(self, edge: Edge) -> None:
        super().__init__()
        self.edge = edge


class Cell:
    """Micro-batch ``i`` in a column.

    Args:
        device: the device of the column

    Attributes:
        imports: for each import, the column that the tensor comes from, and where its gradient goes there
    """

    def __init__(self, device: torch.device) -> None:
        #: The leaf of the graph, in place of all imports.
        self._leaf = get_phony(device).requires_grad_()
        self._exports: dict[tuple[int, int], Export] = {}
        self.imports: list[tuple[int, Arrival]] = []
        self._taken: list[Leaf] = []
        self._rest: Callable[[], None] | None = None

    def export(self, tensor: Tensor) -> Export:
        """Return the export of a tensor that requires grad."""
        edge = get_gradient_edge(tensor)
        key = (id(edge.node), edge.output_nr)
        if key not in self._exports:
            self._exports[key] = Export(edge)
        return self._exports[key]

    def import_(self, column: int, source: Arrival, moved: Tensor) -> Tensor:
        """Return an import: the tensor that ``moved`` is, without its history, at the beginning of this graph."""
        self.imports.append((column, source))
        self._taken.append(None)
        imported: Tensor = Import.apply(self._taken, len(self._taken) - 1, self._leaf, moved)
        return imported

    def differentiate(self, recorded: Recorded, *, split: bool, keep_graph: bool) -> list[tuple[int, Arrival, Tensor]]:
        """Differentiate the graph, and return the gradients of its imports.

        Args:
            recorded: tells the listener
            split: whether to leave the gradients of weights to `differentiate_weights`, if that is possible
            keep_graph: whether the graph will be differentiated again

        Returns:
            for each import that has a gradient: the column that it comes from, where the gradient goes there, and the
            gradient
        """
        arrived = [(export.edge, export.total()) for export in self._exports.values()]
        entered = [(edge, grad) for edge, grad in arrived if grad is not None]
        if not entered:
            self._drop(keep_graph)
            return []
        edges, grads = zip(*entered)
        if split and not self.imports:  # Nobody waits for a gradient, so all of it can be left.
            self._rest = functools.partial(accumulate, edges, grads, keep_graph)
            return self._take(keep_graph)
        if split:
            halves = SplitBackward(edges, self._leaf)
            if halves.is_possible:
                with recorded("backward of the input"):
                    halves.differentiate_inputs(grads)
                self._rest = halves.differentiate_weights
                return self._take(keep_graph)
        with recorded("backward"):
            accumulate(edges, grads, keep_graph)
        return self._take(keep_graph)

    def differentiate_weights(self, recorded: Recorded) -> None:
        """Run what a split `differentiate` has left, if anything."""
        rest, self._rest = self._rest, None
        if rest is not None:
            with recorded("backward of the weights"):
                rest()

    def _take(self, keep_graph: bool) -> list[tuple[int, Arrival, Tensor]]:
        result = [(j, source, grad) for (j, source), grad in zip(self.imports, self._taken) if grad is not None]
        self._taken[:] = [None] * len(self._taken)
        self._drop(keep_graph)
        return result

    def _drop(self, keep_graph: bool) -> None:
        if not keep_graph:
            self._exports, self.imports = {}, []


class Import(Function):
    """Forward: an alias without history. Backward: take its gradient out of the graph."""

    @staticmethod
    def forward(ctx: Any, taken: list[Leaf], index: int, leaf: Tensor, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.taken, ctx.index = taken, index
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> Any:
        before, grad = ctx.taken[ctx.index], grads[0]
        ctx.taken[ctx.index] = grad if before is None or grad is None else before + grad
        return (None,) * 4
