"""Importing tensors into the column of a frame: from earlier columns, and from other devices.

A tensor that requires grad belongs to the column in which its autograd node was made: its *home*. In a later column, an
*import* stands for the tensor, at the beginning of that cell's graph. A tensor without grad has no home; it is copied
if its memory is on another device.

The model knows the tensor only, and not its import. So whenever the model uses the tensor again in that column, it gets
the same import. If the model has changed the import in place, later columns import from the import. What else reaches
the memory of the tensor, such as a view of it, does not see the change: the proof refuses a model whose sample shows
that.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.cell.cell import Cell
from torchgpipe.devices import links
from torchgpipe.devices.memory import bytes_of
from torchgpipe.devices.torch_internals import base_of, next_sequence_number, sequence_number, versions
from torchgpipe.run.columns import Columns
from torchgpipe.spine.layout import Crossed
from torchgpipe.transport.route import copy_forward, mark_ready

__all__ = ["Imports", "Known"]


class Known(NamedTuple):
    """A tensor with its import or copy in a column; ``tensor`` keeps its id from being used again."""

    tensor: Tensor
    column: int
    result: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether the model has changed the import in place."""
        return versions([self.result]) != [self.version]


class Imports:
    """The imports of one frame.

    Args:
        i: the micro-batch
        cells: the cells of the frame, by column; empty if there is no backward
        columns: the columns, and what all frames share

    Attributes:
        i: the micro-batch
        column: the column that the frame is in
        are_needed: whether any tensor can need an import or a copy
    """

    def __init__(self, i: int, cells: list[Cell], columns: Columns) -> None:
        self.i, self.column = i, 0
        self._cells, self._columns, self._aliases = cells, columns, columns.aliases
        self._copies = columns.copies
        self.are_needed = len(columns) > 1 and (bool(cells) or self._copies or not self._aliases.all_resident)
        #: By the id of a tensor, and whether a graph was recorded.
        self._imports: dict[tuple[int, bool], Known] = {}
        #: The columns that were entered, and for each, the sequence number of the first autograd node made there.
        self._entered: list[int] = []
        self._starts: list[int] = []

    @property
    def begin_here(self) -> bool:
        """Whether any tensor can need an import or a copy in this column."""
        return self.column > 0 and self.are_needed

    def enter(self, column: int) -> None:
        """Begin a column; called in the frame's own thread."""
        self.column = column
        self._entered.append(column)
        self._starts.append(next_sequence_number())

    def span(self, column: int) -> tuple[int, int]:
        """Return the numbers of the autograd nodes made in a column: the first, and the one behind the last.

        Called in the frame's own thread, when the model's forward has returned.
        """
        if column not in self._entered:
            return 0, 0
        starts = [*self._starts, next_sequence_number()]
        k = self._entered.index(column)
        return starts[k], starts[k + 1]

    def _home_of(self, tensor: Tensor, node: Any) -> int:
        """Return the column in which the graph of a tensor was made, which ends in ``node``."""
        view_of = base_of(tensor)
        base = None if view_of is None else view_of.grad_fn
        # If the base of a view was changed in place since, autograd has made the node of the view anew just now.
        return self._home(node) if base is None else min(self._home(node), self._home(base))

    def _home(self, node: Any) -> int:
        """Return the column in which a node of autograd was made."""
        number = sequence_number(node)
        if number >= self._starts[-1]:
            return self.column
        return self._entered[max(0, bisect_right(self._starts, number) - 1)]

    def mark_made(self, tensor: Tensor) -> None:
        """Mark what the model has made on the device of an earlier column as ready: its copy must wait for that."""
        if self._copies and tensor.device != self._columns.devices[self.column]:
            source = self._columns.on_device(tensor.device, self.column)
            if source is not None:
                mark_ready(self._columns[source].leaving, self.i)

    def forget(self) -> None:
        """Forget the imports of the last column, but for those that were changed in place."""
        self._imports = {key: known for key, known in self._imports.items() if known.is_changed}

    def end(self) -> None:
        """Forget all, with the cells."""
        self._imports, self._cells = {}, []

    def import_tensor(self, tensor: Tensor) -> Tensor:
        """Return what stands for ``tensor`` in the current column."""
        # What needs no gradient has one copy, whether a graph is recorded or not.
        column, records = self.column, tensor.requires_grad and torch.is_grad_enabled()
        key = (id(tensor), records)
        known = self._imports.get(key)
        if known is not None:
            if known.is_changed:
                return self.import_tensor(known.result)
            if known.column == column:
                return known.result
        result = self._brought(tensor, records)
        if result is not tensor:
            self._imports[key] = Known(tensor, column, result, versions([result])[0])
        return result

    def _brought(self, tensor: Tensor, records: bool) -> Tensor:
        """Return what stands for a tensor in this column from now on."""
        column, node = self.column, tensor.grad_fn
        alias = self._aliases.at(tensor, column)
        if alias is not None:
            return alias
        # A leaf may require grad: the model keeps it, or a library wants it of what a frozen layer returns.
        home = column if node is None else self._home_of(tensor, node)
        if home == column or (records and not self._cells):
            # Without cells, the model builds a graph of its own under no_grad(), and no other.
            result = self._on_this_device(tensor)
        else:
            result = self._import(tensor, home, records)
        self._aliases.verify_present(result, column, "the model")
        return result

    def _import(self, tensor: Tensor, home: int, records: bool) -> Tensor:
        """Return what stands in this column for a tensor with a graph, of another column of this process."""
        result, column = self._copied(tensor.detach(), home), self.column
        if records:
            export = self._cells[home].export_to(column, tensor)
            result = self._cells[column].import_(result, (self._columns.route(home, column), export))
            if self.i == 0:
                ends = self._columns.members[home][-1], self._columns.members[column][0]
                self._columns.crossed.append(Crossed(*ends, tuple(tensor.shape), tensor.dtype, bytes_of([tensor])))
        return result

    def _copied(self, tensor: Tensor, source: int) -> Tensor:
        """Return a tensor of an earlier column in this one: a copy, if there is a route."""
        route = self._columns.route(source, self.column)
        if route is None:
            return tensor
        copy = copy_forward(route, self.i, (tensor,))[0]
        assert copy is not None
        return copy

    def _on_this_device(self, tensor: Tensor) -> Tensor:
        if not self._copies:
            return tensor
        columns, column = self._columns, self.column
        device = columns.streams.device_of(tensor)
        if device is None or not columns.streams.moves(device, columns.devices[column]):
            return tensor
        source = columns.on_device(device, column)
        if source is None:
            return tensor  # Not of this pipeline: the plain model would meet the same device.
        if tensor.requires_grad:  # A leaf, or made in this column, on a device that the model has remembered.
            return links.to(tensor, columns.devices[column])
        return self._copied(tensor, source)
