"""A column of cells: what the cells of all micro-batches that run the same part of a model share in a mini-batch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from torchgpipe.devices.stream import Stream
from torchgpipe.graph.cut import differentiated_by_itself
from torchgpipe.graph.function import Edge, accumulate
from torchgpipe.listener.listener import Kind, Listener, recorded
from torchgpipe.model.state import note_changes

__all__ = ["Column"]


class Column:
    """A column of cells.

    Args:
        j: the number by which a listener knows it
        where: names it with its device, for errors
        stream: where it computes
        m: the number of micro-batches
        listener: the listener of the mini-batch, if there is one
        splits: whether the backward of a cell may be split

    Attributes:
        j, stream, m, listener, splits: see above
        left: the cells whose split backward has left something, in its order; weakly, as a step may fail in between
    """

    def __init__(
        self, j: int, where: str, stream: Stream, m: int, listener: Listener | None, *, splits: bool = True
    ) -> None:
        self.j, self._where, self.stream, self.m = j, where, stream, m
        self.listener, self.splits = listener, splits
        self.left: list[weakref.ref[Any]] = []

    @property
    def where(self) -> str:
        """The column with its device, for errors."""
        return self._where

    def recorded(self, kind: Kind, i: int) -> AbstractContextManager[None]:
        """Tell the listener of the mini-batch, if there is one, what runs in a ``with`` block."""
        return recorded(self.listener, kind, i, self.j, None, self.stream)

    def note(self, error: BaseException, i: int, phase: str) -> None:
        """Add a note to ``error`` that tells the cell and the phase, such as forward."""
        note = f"micro-batch {i} of {self.m}, {self.where}, during {phase}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
            note_changes(error)

    def by_itself(self) -> RuntimeError:
        """Return the error for a tensor of a cell that something else than the pipeline differentiates."""
        return differentiated_by_itself(self.where)

    def sink(
        self, edges: Sequence[Edge], grads: Sequence[Tensor], leaves: Sequence[Tensor], keep_graph: bool
    ) -> object:
        """Differentiate a graph, and add to the gradients of its parameters; see `Sink`."""
        accumulate(edges, grads, keep_graph)
        return None
