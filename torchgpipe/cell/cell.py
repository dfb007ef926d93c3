"""A cell: micro-batch i in column j, with a graph that is cut from those of other cells; see `graph`.

Every front makes its cells of this class. A frame of any model imports and exports one tensor at a time, as the model's
own forward comes to it; of a Sequential, `LayersCell` runs the layers, once or twice.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.cell.column import Column
from torchgpipe.devices.typing import Leaf
from torchgpipe.graph.cut import CutGraph, verify_complete
from torchgpipe.graph.function import Edge
from torchgpipe.graph.split_backward import nodes_below
from torchgpipe.listener.listener import Kind
from torchgpipe.offload.host_copies import HostCopy, Kept, restored
from torchgpipe.transport.route import Route

__all__ = ["Arrival", "Cell", "Export", "Source"]


class Arrival:
    """The gradients of a tensor that arrive from the cells that the tensor has entered.

    Args:
        column: the column of the cell that the tensor comes from; None if it is the caller's

    Attributes:
        column: see above
    """

    __slots__ = ("_grads", "column")

    def __init__(self, column: int | None = None) -> None:
        self.column = column
        # Added up later: the stream of the cell may have to wait for them first.
        self._grads: list[Tensor | HostCopy] = []

    def add(self, grad: Kept) -> None:
        """Take a gradient that arrives."""
        if grad is not None:
            self._grads.append(grad)

    def total(self) -> Leaf:
        """Return the sum of the gradients that have arrived, and forget them."""
        grads, self._grads = [restored(grad) for grad in self._grads], []
        return functools.reduce(torch.add, grads) if grads else None


class Export(Arrival):
    """A tensor of a cell that other cells take, or the caller.

    Args:
        edge: where the graph of the cell is entered; None as long as there is no graph
        column: the column of the cell

    Attributes:
        edge: see above
    """

    __slots__ = ("edge",)

    def __init__(self, edge: Edge | None, column: int) -> None:
        self.column, self.edge = column, edge
        self._grads = []


#: Where the gradient of what has entered a cell goes: the route back (None if the memory is shared), and what it
#: arrives at.
Source: TypeAlias = tuple[Route | None, Arrival]


class Cell:
    """Micro-batch ``i`` in a column.

    Args:
        i: the micro-batch
        column: the column

    Attributes:
        i, column: see above
        exports: the tensors that later cells or the caller take; None for one that needs no gradient
        second_runs: return what begins the second runs of modules that run again, in the order of their first runs;
            None if nothing of the graph is left
        sources: for each import, where its gradient goes
        span: the numbers of the autograd nodes that were made in this cell, the first, and the one behind the last, if
            the graph is to be verified; else None
    """

    __slots__ = ("__weakref__", "_graph", "_known", "column", "exports", "i", "second_runs", "sources", "span")

    kind_of_export: type[Export] = Export

    def __init__(self, i: int, column: Column) -> None:
        self.i, self.column = i, column
        self._graph: CutGraph | None = None
        self.exports: list[Export | None] = []
        self._known: dict[tuple[int, int], Export] = {}
        self.second_runs: list[Callable[[], Callable[[], None] | None]] = []
        self.sources: list[Source] = []
        self.span: tuple[int, int] | None = None

    def import_(self, tensor: Tensor, source: Source) -> Tensor:
        """Return a tensor of another cell without its history, at the beginning of this graph."""
        self.sources.append(source)
        return self._begin_graph().enter(tensor)[0]

    def _begin_graph(self) -> CutGraph:
        """Return the graph, and begin it if this is the first import or export."""
        if self._graph is None:
            self._graph = CutGraph(self.column.stream.device, self.column.by_itself)
        return self._graph

    def export(self, tensor: Tensor) -> Export:
        """Return the export of a tensor that requires grad; a tensor has one, however many cells take it."""
        self._begin_graph()
        edge = get_gradient_edge(tensor)
        key = (id(edge.node), edge.output_nr)
        if key not in self._known:
            self._known[key] = self.kind_of_export(edge, self.column.j)
            self.exports.append(self._known[key])
        return self._known[key]

    def export_to(self, column: int, tensor: Tensor) -> Arrival:
        """Return what the gradient of a tensor of this cell arrives at from another column."""
        return self.export(tensor)

    def arrived(self) -> list[Leaf]:
        """Return the gradients that have arrived at the exports, and forget them."""
        return [None if end is None else end.total() for end in self.exports]

    def differentiate(self, grads: Sequence[Leaf], *, split: bool = False, keep_graph: bool = False) -> list[Leaf]:
        """Differentiate the graph.

        Args:
            grads: for each export, its gradient
            split: whether to leave the gradients of the parameters to `differentiate_weights`, if that is possible
            keep_graph: whether the graph will be differentiated again

        Returns:
            the gradient of each tensor that has entered, None for one that was not used; nothing if no gradient has
            arrived
        """
        exports = self.exports
        if self.span is not None:
            edges = [end.edge for end in exports if end is not None and end.edge is not None]
            try:
                verify_complete(edges, self.span, self.column.where)
            except RuntimeError as error:
                self.column.note(error, self.i, "backward")
                raise
        pairs = [
            (end.edge, grad)
            for end, grad in zip(exports, grads)
            if end is not None and end.edge is not None and grad is not None
        ]
        if split and not keep_graph:
            self.exports, self._known = [], {}  # They would hold what only the first half of backward needs.
        if not pairs or self._graph is None:
            return []
        result = self._graph.differentiate(
            [edge for edge, _ in pairs],
            [grad for _, grad in pairs],
            self.column.sink,
            self.told,
            split=split and self.column.splits,
            settle=self._settle,
            keep_graph=keep_graph,
        )
        if self._graph.has_rest:
            self.column.left.append(weakref.ref(self))
        return result

    def _settle(self) -> None:
        """Run what earlier micro-batches have left in this column, so that gradients are added in their order."""
        for ref in [*self.column.left]:
            cell = ref()
            if cell is not None:
                cell.differentiate_weights()

    def differentiate_weights(self) -> None:
        """Run what a split `differentiate` has left, if anything."""
        if self._graph is not None and self._graph.has_rest:
            self.column.left.remove(weakref.ref(self))
            self._graph.differentiate_weights(self.told)

    def leaves(self) -> Iterator[Tensor]:
        """Yield the leaves that the graph of this cell ends in."""
        for node in nodes_below([end.edge for end in self.exports if end is not None and end.edge is not None]):
            if type(node).__name__ == "AccumulateGrad":
                yield node.variable

    @contextmanager
    def told(self, kind: Kind) -> Iterator[None]:
        """Tell the listener what runs in a ``with`` block, and add a note to its errors."""
        try:
            with self.column.recorded(kind, self.i):
                yield
        except BaseException as error:
            self.column.note(error, self.i, kind)
            raise
