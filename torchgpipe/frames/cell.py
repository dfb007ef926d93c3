"""A cell of frames: what micro-batch i has computed in column j, as a graph of its own; see `torchgpipe.engine.cut`.

Each tensor of an earlier column is *imported* where it is used, one at a time, and is an *export* of its own cell.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.engine.copy import Route
from torchgpipe.engine.cut import (
    Arrival,
    CutGraph,
    Heard,
    Returned,
    differentiated_by_itself,
    verify_complete,
)
from torchgpipe.engine.function import Edge, accumulate
from torchgpipe.engine.record import recorded
from torchgpipe.engine.split_backward import nodes_below
from torchgpipe.frames.columns import Columns

__all__ = ["Export", "FrameCell"]


class Export(Arrival):
    """A tensor of a cell that later columns import, or the caller gets.

    Args:
        edge: where the graph of the cell is entered
        column: the column of the cell

    Attributes:
        edge: where the graph of the cell is entered
    """

    __slots__ = ("edge",)

    def __init__(self, edge: Edge, column: int) -> None:
        super().__init__(column)
        self.edge = edge


class FrameCell:
    """Micro-batch ``i`` in a column.

    Args:
        i: the micro-batch
        column: the column
        columns: all columns
        verifies: whether to look for operations that the pipeline has not seen
        splits: whether backward may be split

    Attributes:
        span: the numbers of the autograd nodes that the frame's thread has made in this column: the first, and the one
            behind the last
    """

    def __init__(self, i: int, column: int, columns: Columns, *, verifies: bool, splits: bool) -> None:
        stream = columns.computing[column]
        self._column, self._where = column, columns.labels[column]
        self._cut = CutGraph(stream.device, functools.partial(differentiated_by_itself, self._where))
        self._heard: Heard = lambda kind: recorded(columns.listener, kind, i, column, None, stream)
        self._verifies, self._splits = verifies, splits
        self._exports: dict[tuple[int, int], Export] = {}
        #: For each import, the route back, and where its gradient arrives.
        self._sources: list[tuple[Route | None, Arrival]] = []
        self.span = (0, 0)

    def export(self, tensor: Tensor) -> Export:
        """Return the export of a tensor that requires grad."""
        edge = get_gradient_edge(tensor)
        key = (id(edge.node), edge.output_nr)
        if key not in self._exports:
            self._exports[key] = Export(edge, self._column)
        return self._exports[key]

    def import_(self, route: Route | None, source: Arrival, moved: Tensor) -> Tensor:
        """Return an import: the tensor that ``moved`` is, without its history, at the beginning of this graph.

        Args:
            route: the route that the tensor has come on, if it was copied
            source: where its gradient arrives
            moved: the tensor, or its copy on this device
        """
        self._sources.append((route, source))
        return self._cut.enter(moved)[0]

    def leaves(self) -> Iterator[Tensor]:
        """Yield the leaves that the graph of this cell ends in."""
        for node in nodes_below([export.edge for export in self._exports.values()]):
            if type(node).__name__ == "AccumulateGrad":
                yield node.variable

    def differentiate(self, *, split: bool, keep_graph: bool) -> Returned:
        """See `ProgramCell.differentiate`."""
        exports = list(self._exports.values())
        if self._verifies:
            verify_complete([export.edge for export in exports], self.span, self._where)
        pairs = [(export.edge, grad) for export in exports if (grad := export.total()) is not None]
        returned: Returned = []
        if pairs:
            edges, grads = zip(*pairs)
            result = self._cut.differentiate(
                edges, grads, _accumulate, self._heard, split=split and self._splits, keep_graph=keep_graph
            )
            returned = [(*source, grad) for source, grad in zip(self._sources, result) if grad is not None]
        if not keep_graph:
            self._exports, self._sources = {}, []
        return returned

    def differentiate_weights(self) -> None:
        """Run what a split `differentiate` has left, if anything."""
        self._cut.differentiate_weights(self._heard)


def _accumulate(edges: Sequence[Edge], grads: Sequence[Tensor], _: Sequence[Tensor], keep_graph: bool) -> None:
    accumulate(edges, grads, keep_graph)
