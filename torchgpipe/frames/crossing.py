"""Bringing tensors into the column of a frame: from earlier columns, and from other devices.

A tensor that requires grad belongs to the column in which its autograd node was made: its *home*. In a later column, an
*import* stands for the tensor, at the beginning of that cell's graph. A tensor without grad has no home; it is copied
if its memory is on another device.

The model knows the tensor only, and not its import. So whenever the model uses the tensor again in that column, it gets
the same import. If the model has changed the import in place, later columns import from the import.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import versions
from torchgpipe.engine.copy import copy_forward
from torchgpipe.frames.cell import Cell
from torchgpipe.frames.columns import Columns
from torchgpipe.frames.frame import Frame
from torchgpipe.frames.layout import Crossed
from torchgpipe.frames.parameters import Aliases

__all__ = ["Crossing"]


class _Known(NamedTuple):
    """A tensor that was brought into the current column; ``tensor`` keeps its id from being used again."""

    tensor: Tensor
    column: int
    alias: Tensor
    version: int


class Crossing:
    """What one frame brings from column to column.

    Args:
        frame: the frame
        cells: the cells of the frame, by column; empty if there is no backward
        columns: the columns
        aliases: the aliases of parameters
        noted: where to note what crosses; None if nobody wants to know
        buffers: the ids of the model's buffers
    """

    def __init__(
        self,
        frame: Frame,
        cells: list[Cell],
        columns: Columns,
        aliases: Aliases,
        noted: list[Crossed] | None,
        buffers: Set[int],
    ) -> None:
        self._buffers = buffers
        #: By address, the tensors whose imports were changed in place.
        self._changed: dict[int, Tensor] = {}
        self._noted = noted
        self._frame = frame
        self._cells = cells
        self._columns = columns
        self._aliases = aliases
        self._known: dict[tuple[int, bool], _Known] = {}
        self._moves = columns.copies

    def note_change(self, tensor: Tensor) -> None:
        """Note that the import or the copy of ``tensor`` was changed in place, if there is one.

        Raises:
            RuntimeError: ``tensor`` is a buffer, which the change would not reach.
        """
        if (id(tensor), True) not in self._known and (id(tensor), False) not in self._known:
            return
        if id(tensor) in self._buffers:
            raise RuntimeError(
                f"the model changes a buffer of shape {tuple(tensor.shape)} in partition {self._frame.column}, but it "
                "is on the device of another one; give a balance that keeps the buffer's module and its user together"
            )
        self._changed[tensor.untyped_storage().data_ptr()] = tensor

    def forget(self) -> None:
        """Forget the imports of the last column, but for those that were changed in place."""
        self._known = {key: one for key, one in self._known.items() if versions([one.alias]) != [one.version]}

    def bring(self, tensor: Tensor) -> Tensor:
        """Return what stands for ``tensor`` in the current column."""
        frame = self._frame
        column, records = frame.column, torch.is_grad_enabled()
        if self._changed:
            changed = self._changed.get(tensor.untyped_storage().data_ptr(), tensor)
            if changed is not tensor and (id(tensor), records) not in self._known and self._moves:
                raise RuntimeError(
                    f"a tensor of shape {tuple(changed.shape)} was changed in place in partition {column}, which does "
                    f"not reach the view of it of shape {tuple(tensor.shape)} from an earlier partition; change a "
                    "copy (tensor.clone()), or give a balance that keeps both in one partition"
                )
        key = (id(tensor), records)
        known = self._known.get(key)
        if known is not None:
            if versions([known.alias]) != [known.version]:
                return self.bring(known.alias)
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
            else:
                export = self._cells[home].export(tensor)
                moved = self._moved(tensor.detach(), home, column)
                alias = self._cells[column].import_(home, export, moved)
                if self._noted is not None:
                    self._noted.append(Crossed(home, column, tuple(tensor.shape), tensor.dtype, tensor.nbytes))
        elif self._moves:
            alias = self._on_this_device(tensor, column)
        if alias is not tensor:
            self._known[key] = _Known(tensor, column, alias, versions([alias])[0])
        return alias

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
