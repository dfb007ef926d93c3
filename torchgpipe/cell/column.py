"""A column of cells: what the cells of all micro-batches that run the same part of a model share in a mini-batch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchgpipe.devices.stream import Stream
from torchgpipe.graph.cut import differentiated_by_itself
from torchgpipe.graph.function import Edge, accumulate
from torchgpipe.listener.listener import Kind, Listener, recorded
from torchgpipe.model.state import note_changes
from torchgpipe.transport.route import Route

__all__ = ["Column"]


@dataclass(eq=False)
class Column:
    """A column of cells.

    Attributes:
        j: its number among all columns
        label: names it with its device, for errors
        stream: where it computes
        m: the number of micro-batches
        listener: the listener of the mini-batch, if there is one
        leaving: the routes that begin here
        splits: whether the backward of a cell may be split
        left: the cells whose split backward has left something, in its order; weakly, as a step may fail in between
    """

    j: int
    label: str
    stream: Stream
    m: int
    listener: Listener | None
    leaving: Sequence[Route]
    splits: bool = True
    left: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def partition(self) -> int:
        """The number of the partition that runs, of which listeners and errors tell."""
        return self.j

    @property
    def where(self) -> str:
        """The column with its device, for errors."""
        return self.label

    def recorded(self, kind: Kind, i: int) -> AbstractContextManager[None]:
        """Tell the listener of the mini-batch, if there is one, what runs in a ``with`` block."""
        return recorded(self.listener, kind, i, self.partition, None, self.stream)

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
