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

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpipe.cell.cell import Cell
from torchgpipe.devices.torch_internals import versions
from torchgpipe.frames.columns import Shared
from torchgpipe.frames.frame import Frame
from torchgpipe.frames.layout import Crossed
from torchgpipe.transport.route import copy_forward, mark_ready

__all__ = ["Crossing"]


class _Import(NamedTuple):
    """A tensor with its import or copy in a column; ``tensor`` keeps its id from being used again."""

    tensor: Tensor
    column: int
    result: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether the model has changed the import in place."""
        return versions([self.result]) != [self.version]


class Crossing:
    """The imports of one frame.

    Args:
        frame: the frame
        cells: the cells of the frame, by column; empty if there is no backward
        shared: what all frames share
    """

    def __init__(self, frame: Frame, cells: list[Cell], shared: Shared) -> None:
        self._frame = frame
        self._cells = cells
        self._columns = shared.columns
        self._aliases = shared.aliases
        self._crossed = None if frame.i else shared.crossed
        #: By the id of a tensor, and whether a graph was recorded.
        self._imports: dict[tuple[int, bool], _Import] = {}
        self._copies = shared.columns.copies

    @property
    def is_needed(self) -> bool:
        """Whether any tensor can need an import or a copy. If False, run the model without the mode."""
        return bool(self._cells) or self._copies or not self._aliases.all_resident

    def mark_made(self, tensor: Tensor) -> None:
        """Mark what the model has made on the device of an earlier column as ready: its copy must wait for that."""
        if self._copies and tensor.device != self._columns.devices[self._frame.column]:
            source = self._columns.column_of(tensor.device, self._frame.column)
            if source is not None:
                mark_ready(self._columns.leaving(source), self._frame.i)

    def forget(self) -> None:
        """Forget the imports of the last column, but for those that were changed in place."""
        self._imports = {key: known for key, known in self._imports.items() if known.is_changed}

    def end(self) -> None:
        """Forget all: later frames may run in settings that hold this object."""
        self._imports = {}

    def import_tensor(self, tensor: Tensor) -> Tensor:
        """Return what stands for ``tensor`` in the current column."""
        aliases, column = self._aliases, self._frame.column
        alias = aliases.resident(tensor, column)
        if alias is not None:
            return alias
        result = self._import(tensor)
        aliases.verify_present(result, column, "the model")
        return result

    def _import(self, tensor: Tensor) -> Tensor:
        frame = self._frame
        # What needs no gradient has one copy, whether a graph is recorded or not.
        column, records = frame.column, tensor.requires_grad and torch.is_grad_enabled()
        key = (id(tensor), records)
        known = self._imports.get(key)
        if known is not None:
            if known.is_changed:
                return self._import(known.result)
            if known.column == column:
                return known.result
        home = column
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is None:
                return self._import_leaf(tensor)
            home = frame.home(node)
        if home == column or (records and not self._cells):
            # Without cells, the model builds a graph of its own under no_grad(), and no other.
            result = self._on_this_device(tensor)
        else:
            result = self._copied(tensor.detach(), home)
            if records:
                export = self._cells[home].export(tensor)
                result = self._cells[column].import_(result, (self._columns.route(home, column), export))
                if self._crossed is not None:
                    boundary = self._columns.members[home][-1], self._columns.members[column][0]
                    self._crossed.append(Crossed(*boundary, tuple(tensor.shape), tensor.dtype, tensor.nbytes))
        if result is not tensor:
            self._imports[key] = _Import(tensor, column, result, versions([result])[0])
        return result

    def _copied(self, tensor: Tensor, source: int) -> Tensor:
        """Return a tensor of an earlier column in this one: a copy, if there is a route."""
        route = self._columns.route(source, self._frame.column)
        if route is None:
            return tensor
        copy = copy_forward(route, self._frame.i, (tensor,))[0]
        assert copy is not None
        return copy

    def _import_leaf(self, tensor: Tensor) -> Tensor:
        alias = self._aliases.at(tensor, self._frame.column)
        if alias is not None:
            return alias
        # A tensor that the model keeps, or the output of a frozen layer that a library lets require grad.
        return self._on_this_device(tensor)

    def _on_this_device(self, tensor: Tensor) -> Tensor:
        if not self._copies:
            return tensor
        columns, column = self._columns, self._frame.column
        device = columns.streams.device_of(tensor)
        if device is None or not columns.streams.moves(device, columns.devices[column]):
            return tensor
        source = columns.column_of(device, column)
        if source is None:
            return tensor  # Not of this pipeline: the plain model would meet the same device.
        if tensor.requires_grad:  # A leaf, or made in this column, on a device that the model has remembered.
            return tensor.to(columns.devices[column])
        return self._copied(tensor, source)
