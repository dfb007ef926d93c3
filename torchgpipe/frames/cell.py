"""A cell of frames: what micro-batch i has computed in column j, as a graph of its own.

The graph begins at imports, which stand for what earlier columns have computed, and ends at exports, which later
columns have imported:

    column 0                    column 1                      column 2
    ──► a ──────── export ┐ ┌─► Import ──► b ──── export ┐ ┌─► Import ──► loss
        └───────── export ┼─┼────────────────────────────┘ └─► Import ──┘
                          └─┘

So the backward of a cell is one pass from its exports, with the gradients that the imports of later columns have taken.
It adds to the gradients of the parameters, and takes the gradients of its own imports.

All of this holds if the cut is complete: if every tensor of an earlier column was imported. An operation that nobody
has seen, such as a function of `torch.autograd`, may have taken one without. Then a pass would walk from one cell
into another, and gradients would be lost. Two things notice that: a node that is older than its cell
(`verify_complete`), and an import that is reached while its own cell is not being differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.torch_internals import sequence_number
from torchgpipe.devices.typing import Leaf
from torchgpipe.engine.function import Edge, Function, accumulate
from torchgpipe.engine.phony import get_phony
from torchgpipe.engine.record import Kind
from torchgpipe.engine.split_backward import SplitBackward, nodes_below

__all__ = ["Arrival", "Cell", "Export", "Import", "Recorded", "differentiated_by_itself"]

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


class _Entrance:
    """The gradients of a cell's imports. The graph holds its entrance; the entrance does not hold the graph.

    Attributes:
        grads: for each import, the gradient that has arrived
        is_open: whether the cell is being differentiated
        where: the cell, for errors
    """

    __slots__ = ("grads", "is_open", "where")

    def __init__(self, where: str) -> None:
        self.grads: list[Leaf] = []
        self.is_open = False
        self.where = where


class Cell:
    """Micro-batch ``i`` in a column.

    Args:
        device: the device of the column
        where: the column, for errors

    Attributes:
        imports: for each import, the column that the tensor comes from, and where its gradient goes there
        span: the numbers of the autograd nodes that the frame's thread has made in this column: the first, and the one
            behind the last
    """

    def __init__(self, device: torch.device, where: str) -> None:
        #: The leaf of the graph, in place of all imports.
        self._leaf = get_phony(device).requires_grad_()
        self._exports: dict[tuple[int, int], Export] = {}
        self.imports: list[tuple[int, Arrival]] = []
        self.span = (0, 0)
        self._entrance = _Entrance(where)
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
        entrance = self._entrance
        entrance.grads.append(None)
        imported: Tensor = Import.apply(entrance, len(entrance.grads) - 1, self._leaf, moved)
        return imported

    def leaves(self) -> Iterator[Tensor]:
        """Yield the leaves that the graph of this cell ends in."""
        for node in nodes_below([export.edge for export in self._exports.values()]):
            if type(node).__name__ == "AccumulateGrad":
                yield node.variable

    def verify_complete(self) -> None:
        """Check that the graph of this cell has been made in this cell.

        Raises:
            RuntimeError: an operation of this cell has taken a tensor of another cell, or of another thread, which was
                not imported, so the pass would go on there.
        """
        begin, end = self.span
        users: dict[Any, Any] = {}
        for node in nodes_below([export.edge for export in self._exports.values()]):
            name = type(node).__name__
            # Autocast hands the cast of a parameter from one micro-batch to the next.
            if name not in ("AccumulateGrad", "ToCopyBackward0") and not begin <= sequence_number(node) < end:
                user = users.get(node)
                by = f"'{type(user).__name__}'" if user is not None else "an operation"
                raise RuntimeError(
                    f"in {self._entrance.where}, {by} takes a tensor that '{name}' has made in another partition or "
                    "thread, or before the call, and that the pipeline has not seen on its way, as with "
                    "torch.autograd.Function.apply, scripted functions, reentrant checkpointing, objects of classes of "
                    "your own, and thread pools; let one module of the spine do it that gets the tensor as an "
                    "argument, or give a balance that keeps both in one partition"
                )
            users.update({below: node for below, _ in node.next_functions if below is not None})

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
        self._entrance.is_open = True
        try:
            return self._differentiate(recorded, split, keep_graph)
        finally:
            self._entrance.is_open = self._rest is not None

    def _differentiate(self, recorded: Recorded, split: bool, keep_graph: bool) -> list[tuple[int, Arrival, Tensor]]:
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
            try:
                with recorded("backward of the weights"):
                    rest()
            finally:
                self._entrance.is_open = False

    def _take(self, keep_graph: bool) -> list[tuple[int, Arrival, Tensor]]:
        taken = self._entrance.grads
        result = [(j, source, grad) for (j, source), grad in zip(self.imports, taken) if grad is not None]
        taken[:] = [None] * len(taken)
        self._drop(keep_graph)
        return result

    def _drop(self, keep_graph: bool) -> None:
        if not keep_graph:
            self._exports, self.imports = {}, []


def differentiated_by_itself(where: str) -> RuntimeError:
    """Return the error for a tensor from the midst of a model that something else than the pipeline differentiates."""
    return RuntimeError(
        f"a tensor from the midst of {where} was differentiated by itself: by backward() or torch.autograd.grad within "
        "a forward, or because a hook or an attribute has kept it, and what it depends on would not get its gradient; "
        "return it as an output of the model, or let one module of the spine differentiate what begins there"
    )


class Import(Function):
    """Forward: an alias without history. Backward: take its gradient out of the graph."""

    @staticmethod
    def forward(ctx: Any, entrance: _Entrance, index: int, leaf: Tensor, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entrance, ctx.index = entrance, index
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> Any:
        entrance: _Entrance = ctx.entrance
        if not entrance.is_open:
            raise differentiated_by_itself(entrance.where)
        before, grad = entrance.grads[ctx.index], grads[0]
        entrance.grads[ctx.index] = grad if before is None or grad is None else before + grad
        return (None,) * 4
