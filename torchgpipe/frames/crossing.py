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

from torchgpipe.devices.torch_internals import is_checkpointed, versions
from torchgpipe.engine.copy import copy_forward
from torchgpipe.frames.cell import FrameCell
from torchgpipe.frames.columns import Shared
from torchgpipe.frames.frame import Frame
from torchgpipe.frames.layout import Crossed

__all__ = ["Crossing"]


class _Known(NamedTuple):
    """A tensor that was brought into the current column; ``tensor`` keeps its id from being used again."""

    tensor: Tensor
    column: int
    alias: Tensor
    version: int


class _Changed(NamedTuple):
    """A tensor whose import or copy, the ``alias``, was changed in place in a column."""

    tensor: Tensor
    alias: Tensor
    column: int


class Crossing:
    """What one frame brings from column to column.

    Args:
        frame: the frame
        cells: the cells of the frame, by column; empty if there is no backward
        shared: what all frames share
    """

    def __init__(self, frame: Frame, cells: list[FrameCell], shared: Shared) -> None:
        self._frame = frame
        self._cells = cells
        self._columns = shared.columns
        self._aliases = shared.aliases
        self._buffers = shared.buffers
        self._noted = None if frame.i else shared.crossed
        #: By address, the tensors whose imports were changed in place.
        self._changed: dict[int, _Changed] = {}
        self._known: dict[tuple[int, bool], _Known] = {}
        self._moves = shared.columns.copies

    @property
    def is_needed(self) -> bool:
        """Whether any tensor can need an import or a copy; without both, the model may run as if alone."""
        return bool(self._cells) or self._moves or self._aliases.host_memory is not None

    def note_changes(self) -> None:
        """Note the imports and copies that a module of this column has changed in place."""
        for one in list(self._known.values()):
            if one.column == self._frame.column and versions([one.alias]) != [one.version]:
                self.note_change(one.tensor)

    def note_change(self, tensor: Tensor) -> None:
        """Note that the import or the copy of ``tensor`` was changed in place, if there is one.

        Raises:
            RuntimeError: ``tensor`` is a buffer, which the change would not reach.
        """
        known = self._known.get((id(tensor), True)) or self._known.get((id(tensor), False))
        if known is None:
            return
        if id(tensor) in self._buffers:
            raise RuntimeError(
                f"the model changes a buffer of shape {tuple(tensor.shape)} in partition {self._frame.column}, but it "
                "is on the device of another one; give a balance that keeps the buffer's module and its user together"
            )
        address = tensor.untyped_storage().data_ptr()
        self._changed.setdefault(address, _Changed(tensor, known.alias, self._frame.column))

    def forget(self) -> None:
        """Forget the imports of the last column, but for those that were changed in place."""
        self._known = {key: one for key, one in self._known.items() if versions([one.alias]) != [one.version]}

    def end(self) -> None:
        """Forget all: later frames may run in settings that hold this object."""
        self._known = {}

    def bring(self, tensor: Tensor) -> Tensor:
        """Return what stands for ``tensor`` in the current column.

        Raises:
            RuntimeError: another view of its memory was changed in place, which does not reach this view.
        """
        if self._changed:
            changed = self._changed.get(tensor.untyped_storage().data_ptr())
            if changed is not None and self._is_stale(tensor, changed):
                raise RuntimeError(
                    f"a tensor of shape {tuple(changed.tensor.shape)} was changed in place in partition "
                    f"{changed.column}, which does not reach the view of the same memory of shape "
                    f"{tuple(tensor.shape)} from an earlier partition; change a copy (tensor.clone()), or give a "
                    "balance that keeps both in one partition"
                )
        if self._aliases.host_memory is None:
            return self._brought(tensor)
        brought = self._aliases.at(tensor, self._frame.column)
        if brought is None:
            brought = self._brought(tensor)
            self._aliases.verify_present(brought, self._frame.column, "the model")
        return brought

    def bring_operand(self, tensor: Tensor) -> Tensor:
        """Return what stands for ``tensor`` in an operation between two modules.

        Raises:
            RuntimeError: as in `bring`; or a checkpoint of the model's own is around the operation, which would run it
                again with ``tensor`` on the other device.
        """
        brought = self.bring(tensor)
        if self._moves and brought is not tensor and is_checkpointed():
            device_of = self._columns.streams.device_of
            here, there = device_of(brought), device_of(tensor)
            if here is not None and there is not None and self._columns.streams.moves(there, here):
                raise RuntimeError(
                    f"torch.utils.checkpoint is around an operation in partition {self._frame.column}, on {here}, that "
                    f"takes a tensor of shape {tuple(tensor.shape)} from {there}, where it would stay when the "
                    "operation runs again; put the operation into a module, or give a balance that keeps both on one "
                    "device"
                )
        return brought

    def _is_stale(self, tensor: Tensor, changed: _Changed) -> bool:
        """Return whether a change that its own alias got has not reached a tensor of the same memory."""
        if tensor is changed.tensor or tensor is changed.alias:
            return False
        if tensor.requires_grad and tensor.grad_fn is not None:
            return self._frame.home(tensor.grad_fn) < changed.column
        return changed.alias.untyped_storage().data_ptr() != changed.tensor.untyped_storage().data_ptr()

    def _brought(self, tensor: Tensor) -> Tensor:
        frame = self._frame
        # What needs no gradient has one copy, whether a graph is recorded or not, so that a change in place is seen.
        column, records = frame.column, tensor.requires_grad and torch.is_grad_enabled()
        key = (id(tensor), records)
        known = self._known.get(key)
        if records and self._moves:
            self._refuse_changed_copy(tensor)
        if known is not None:
            if versions([known.alias]) != [known.version]:
                return self._brought(known.alias)
            if known.column == column:
                return known.alias
        home = column
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is None:
                return self._bring_leaf(tensor)
            home = frame.home(node)
        alias = tensor
        if home != column:
            if not records:
                alias = self._moved(tensor.detach(), home, column)
            elif not self._cells:  # The model builds a graph of its own under no_grad(), and no other.
                alias = self._on_this_device(tensor, column) if self._moves else tensor
            else:
                export = self._cells[home].export(tensor)
                moved = self._moved(tensor.detach(), home, column)
                alias = self._cells[column].import_(self._columns.route(home, column), export, moved)
                if self._noted is not None:
                    self._noted.append(Crossed(home, column, tuple(tensor.shape), tensor.dtype, tensor.nbytes))
        elif self._moves:
            alias = self._on_this_device(tensor, column)
        if alias is not tensor:
            self._known[key] = _Known(tensor, column, alias, versions([alias])[0])
        return alias

    def _refuse_changed_copy(self, tensor: Tensor) -> None:
        """Refuse a tensor whose copy without a graph was changed in place: its import has the former values."""
        copy = self._known.get((id(tensor), False))
        if copy is not None and versions([copy.alias]) != [copy.version]:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} from an earlier partition was changed in place under "
                f"no_grad() in partition {copy.column}, on a copy without a graph; change a copy of your own "
                "(tensor.clone()), or give a balance that keeps both in one partition"
            )

    def _moved(self, tensor: Tensor, a: int, c: int) -> Tensor:
        route = self._columns.route(a, c)
        if route is None:
            return tensor
        moved = copy_forward(route, self._frame.i, (tensor,))[0]
        assert moved is not None
        return moved

    def _on_this_device(self, tensor: Tensor, column: int) -> Tensor:
        columns = self._columns
        there, device = columns.streams.device_of(tensor), columns.devices[column]
        if there is None or not columns.streams.moves(there, device):
            return tensor
        source = columns.column_of(there, column)
        if source is None:
            return tensor  # Not of this pipeline: the plain model would meet the same device.
        if tensor.requires_grad:  # A leaf, or made in this column, on a device that the model has remembered.
            return tensor.to(device)
        return self._moved(tensor, source, column)

    def _bring_leaf(self, tensor: Tensor) -> Tensor:
        column = self._frame.column
        alias = self._aliases.at(tensor, column)
        if alias is not None:
            return alias
        # A tensor that the model keeps, or the output of a frozen layer that a library lets require grad.
        return self._on_this_device(tensor, column) if self._moves else tensor
