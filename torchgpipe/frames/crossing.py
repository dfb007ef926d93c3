"""Bringing tensors into the column of a frame: from earlier columns, and from other devices.

A tensor that requires grad belongs to the column in which its autograd node was made: its *home*. In a later column, an
*import* stands for the tensor, at the beginning of that cell's graph. A tensor without grad has no home; it is copied
if its memory is on another device.

The model knows the tensor only, and not its import. So whenever the model uses the tensor again in that column, it gets
the same import. If the model has changed the import in place, later columns import from the import.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import is_checkpointed, memory_of, versions
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.copy import copy_forward, mark_ready
from torchgpipe.frames.columns import Shared
from torchgpipe.frames.frame import Frame
from torchgpipe.frames.layout import Crossed

__all__ = ["Crossing"]


class _Brought(NamedTuple):
    """A tensor with its import or copy in a column, the ``alias``; ``tensor`` keeps its id from being used again."""

    tensor: Tensor
    column: int
    alias: Tensor
    version: int

    @property
    def is_changed(self) -> bool:
        """Whether the model has changed the alias in place."""
        return versions([self.alias]) != [self.version]


class Crossing:
    """What one frame brings from column to column.

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
        self._buffers = shared.buffers
        self._crossed = None if frame.i else shared.crossed
        #: By address, the tensors whose imports were changed in place.
        self._changed: dict[int, _Brought] = {}
        #: By the id of a tensor, and whether a graph was recorded.
        self._brought: dict[tuple[int, bool], _Brought] = {}
        self._copies = shared.columns.copies

    @property
    def is_needed(self) -> bool:
        """Whether any tensor can need an import or a copy; without both, the model may run as if alone."""
        return bool(self._cells) or self._copies or self._aliases.host_memory is not None

    def note_changes(self) -> None:
        """Note the imports and copies that a module of this column has changed in place."""
        for brought in list(self._brought.values()):
            if brought.column == self._frame.column and brought.is_changed:
                self.note_change(brought.tensor)

    def note_change(self, tensor: Tensor) -> None:
        """Note that the import or the copy of ``tensor`` was changed in place, if there is one.

        Raises:
            RuntimeError: ``tensor`` is a buffer, which the change would not reach.
        """
        brought = self._brought.get((id(tensor), True)) or self._brought.get((id(tensor), False))
        if brought is None:
            return
        if id(tensor) in self._buffers:
            where = self._columns.names[self._frame.column]
            raise RuntimeError(
                f"the model changes a buffer of shape {tuple(tensor.shape)} in {where}, but it is on the device of "
                "another one; give a balance that keeps the buffer's module and its user together"
            )
        self._changed.setdefault(memory_of(tensor).data_ptr(), brought)

    def note_made(self, tensor: Tensor) -> None:
        """Note what the model has made: on the device of an earlier column, copies would not wait for that."""
        if self._copies and tensor.device != self._columns.devices[self._frame.column]:
            source = self._columns.column_of(tensor.device, self._frame.column)
            if source is not None:
                mark_ready(self._columns.leaving(source), self._frame.i)

    def forget(self) -> None:
        """Forget the imports of the last column, but for those that were changed in place."""
        self._brought = {key: brought for key, brought in self._brought.items() if brought.is_changed}

    def end(self) -> None:
        """Forget all: later frames may run in settings that hold this object."""
        self._brought = {}

    def bring(self, tensor: Tensor) -> Tensor:
        """Return what stands for ``tensor`` in the current column.

        Raises:
            RuntimeError: another view of its memory was changed in place, which does not reach this view.
        """
        if self._changed:
            changed = self._changed.get(memory_of(tensor).data_ptr())
            if changed is not None and self._is_stale(tensor, changed):
                raise RuntimeError(
                    f"a tensor of shape {tuple(changed.tensor.shape)} was changed in place in "
                    f"{self._columns.names[changed.column]}, which does not reach the view of the same memory of shape "
                    f"{tuple(tensor.shape)} from an earlier partition; change a copy (tensor.clone()), or give a "
                    "balance that keeps both in one partition"
                )
        if self._aliases.host_memory is None:
            return self._bring(tensor)
        alias = self._aliases.at(tensor, self._frame.column)
        if alias is None:
            alias = self._bring(tensor)
            self._aliases.verify_present(alias, self._frame.column, "the model")
        return alias

    def bring_operand(self, tensor: Tensor) -> Tensor:
        """Return what stands for ``tensor`` in an operation between two modules.

        Raises:
            RuntimeError: as in `bring`; or a checkpoint of the model's own is around the operation, which would run it
                again with ``tensor`` on the other device.
        """
        alias = self.bring(tensor)
        if self._copies and alias is not tensor and is_checkpointed():
            device_of = self._columns.streams.device_of
            source, device = device_of(tensor), device_of(alias)
            if source is not None and device is not None and self._columns.streams.moves(source, device):
                where = self._columns.names[self._frame.column]
                raise RuntimeError(
                    f"torch.utils.checkpoint is around an operation in {where}, on {device}, that takes a tensor of "
                    f"shape {tuple(tensor.shape)} from {source}, where it would stay when the operation runs again; "
                    "put the operation into a module, or give a balance that keeps both on one device"
                )
        return alias

    def _is_stale(self, tensor: Tensor, changed: _Brought) -> bool:
        """Return whether a change that its own alias got has not reached a tensor of the same memory."""
        if tensor is changed.tensor or tensor is changed.alias:
            return False
        if tensor.requires_grad and tensor.grad_fn is not None:
            return self._frame.home(tensor.grad_fn) < changed.column
        return memory_of(changed.alias).data_ptr() != memory_of(changed.tensor).data_ptr()

    def _bring(self, tensor: Tensor) -> Tensor:
        frame = self._frame
        # What needs no gradient has one copy, whether a graph is recorded or not, so that a change in place is seen.
        column, records = frame.column, tensor.requires_grad and torch.is_grad_enabled()
        key = (id(tensor), records)
        brought = self._brought.get(key)
        if records and self._copies:
            self._refuse_changed_copy(tensor)
        if brought is not None:
            if brought.is_changed:
                return self._bring(brought.alias)
            if brought.column == column:
                return brought.alias
        home = column
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is None:
                return self._bring_leaf(tensor)
            home = frame.home(node)
        if home == column or (records and not self._cells):
            # Without cells, the model builds a graph of its own under no_grad(), and no other.
            alias = self._on_this_device(tensor)
        else:
            alias = self._copied(tensor.detach(), home)
            if records:
                export = self._cells[home].export(tensor)
                alias = self._cells[column].import_(alias, (self._columns.route(home, column), export))
                if self._crossed is not None:
                    boundary = self._columns.members[home][-1], self._columns.members[column][0]
                    self._crossed.append(Crossed(*boundary, tuple(tensor.shape), tensor.dtype, tensor.nbytes))
        if alias is not tensor:
            self._brought[key] = _Brought(tensor, column, alias, versions([alias])[0])
        return alias

    def _refuse_changed_copy(self, tensor: Tensor) -> None:
        """Refuse a tensor whose copy without a graph was changed in place: its import has the former values."""
        copy = self._brought.get((id(tensor), False))
        if copy is not None and copy.is_changed:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} from an earlier partition was changed in place under "
                f"no_grad() in {self._columns.names[copy.column]}, on a copy without a graph; change a copy of your "
                "own (tensor.clone()), or give a balance that keeps both in one partition"
            )

    def _copied(self, tensor: Tensor, source: int) -> Tensor:
        """Return a tensor of an earlier column in this one: a copy, if there is a route."""
        route = self._columns.route(source, self._frame.column)
        if route is None:
            return tensor
        copy = copy_forward(route, self._frame.i, (tensor,))[0]
        assert copy is not None
        return copy

    def _bring_leaf(self, tensor: Tensor) -> Tensor:
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
