"""Who runs a model whose spine has doors, beside a frame: a recomputation at backward, or all rows in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe.devices.stream import Streams
from torchgpipe.devices.torch_internals import without_function_mode
from torchgpipe.model.values import each, mapped
from torchgpipe.processes.stand_in import StandIn
from torchgpipe.run.columns import Columns
from torchgpipe.run.frame import Frame
from torchgpipe.spine.door import Door, Owner
from torchgpipe.spine.glue import DIFFERENTIATES, OF_THE_ORIGINAL, changes_in_place
from torchgpipe.transport.copier import copier

__all__ = ["InOnePiece", "RecomputationVisitor", "unobserved"]


class RecomputationVisitor:
    """The visitor in a worker that runs backward: what is recomputed may reach doors again.

    Args:
        columns: the columns, and what all frames share
        column: the column that is differentiated
    """

    def __init__(self, columns: Columns, column: int) -> None:
        self.owner, self._columns, self._column = columns.owner, columns, column

    def visit(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Copy the arguments, which are those of the first run, and call the module.

        Raises:
            RuntimeError: the module belongs to another device, or process.
        """
        columns, j = self._columns, self._column
        if columns.processes is not None:
            if not columns.is_mine(door.column):
                raise RuntimeError(_CHECKPOINT_OF_SEVERAL.format(door.name))
            args, kwargs = mapped((args, kwargs), lambda tensor: _with_kept(tensor, door.name))
        door = columns.here(door, j)
        if columns.streams.moves(columns.devices[j], columns.devices[door.column]):
            there, here = columns.name_of(door.column), columns.name_of(j)
            raise RuntimeError(
                f"'{door.name}' belongs to {there}, and a reentrant checkpoint around it began in {here}, on another "
                "device, which it cannot cross; use "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or checkpoint=[...] of pipelined"
            )
        return door.call_exchanged(args, kwargs, columns.copier(door.column))


_CHECKPOINT_OF_SEVERAL = (
    "a torch.utils.checkpoint around '{}' holds what several processes compute, or is a reentrant one, so it cannot "
    "run again in one of them; put it around that module alone, with use_reentrant=False, or give "
    "pipelined(checkpoint=True)"
)


def _with_kept(tensor: Tensor, name: str) -> Tensor:
    """Return the values that were received for a stand-in in the first run of a checkpoint."""
    if not isinstance(tensor, StandIn):
        return tensor
    if tensor.kept is None:
        raise RuntimeError(_CHECKPOINT_OF_SEVERAL.format(name))
    return tensor.kept.detach().requires_grad_(tensor.requires_grad)


def unobserved() -> AbstractContextManager[object]:
    """Take the mode of a frame, or of a run in one piece, off the stack for a ``with`` block: tensors stay in place."""
    return without_function_mode(lambda mode: isinstance(mode, (Frame, InOnePiece)))


class InOnePiece(TorchFunctionMode):
    """The visitor of a run in one piece, in the caller's thread, which goes from device to device as the model does.

    Args:
        devices: the device of each column
        streams: tells what must be copied
        owner: the identity of the pipeline
        moved: is called with the column of each module of the spine
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        streams: Streams,
        owner: Owner,
        moved: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.owner = owner
        self._devices, self._streams, self._moved = devices, streams, moved
        self._change = copier(streams, devices[0], devices)
        self._is_off = False

    def visit(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Copy the arguments, and call the module with its device current, which kernels of the user's may need."""
        self._moved(door.column)
        device = self._devices[door.column]
        self._change = copier(self._streams, device, self._devices)
        with self._streams.current(device).use():
            return door.call_exchanged(args, kwargs, self._copied)

    def _copied(self, tensor: Tensor) -> Tensor:
        outer, self._is_off = self._is_off, True  # Asked for its device, a tensor would tell where it is needed.
        try:
            return self._change(tensor)
        finally:
            self._is_off = outer

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling() or self._is_off:
            return func(*args, **kwargs)
        if func in OF_THE_ORIGINAL or func in DIFFERENTIATES:  # A copy is no leaf, and has no ``.grad``.
            return func(*args, **kwargs)
        # What is changed in place stays where it is, or a copy would be changed in its place; the others come there.
        changed = kwargs["out"] if "out" in kwargs else args[:1] if changes_in_place(func) else ()
        devices = [self._streams.device_of(tensor) for _, tensor in each(changed)]
        place = next((device for device in devices if device is not None and device in self._devices), None)
        to_place = self._change if place is None else copier(self._streams, place, self._devices)
        return func(*mapped(args, to_place), **mapped(kwargs, to_place))
