"""What of a frame rests in host memory under ``offload``: tensors until backward, or until the frame's next turn.

for the turn       what the model passes on from one module to the next while the frame waits; the model holds these
                   tensors, so only their memory can go
for backward       the arguments of a module that runs again; what rested for the turn is in host memory already
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from torchgpipe.devices.stream import Stream
from torchgpipe.devices.torch_internals import storage_key, versions
from torchgpipe.frames.imports import Imports
from torchgpipe.model.values import each
from torchgpipe.offload.resting import Rested, Resting
from torchgpipe.schedule import Action

__all__ = ["FrameRest"]


class FrameRest:
    """What of one frame rests in host memory.

    Args:
        frame: the imports of the frame, which know where it is
        resting: takes tensors to host memory
        computing: the stream that each column computes on
        arguments: the arguments of the model, whose memory is the caller's
    """

    def __init__(self, frame: Imports, resting: Resting, computing: Sequence[Stream], arguments: Any) -> None:
        self._frame, self._resting, self._computing = frame, resting, computing
        self._callers = {storage_key(tensor) for _, tensor in each(arguments)}
        #: What has rested until this column began.
        self._rested: list[tuple[Tensor, Rested]] = []

    def keep(self, tensor: Tensor) -> Tensor | Rested:
        """Return what to keep of a tensor until backward; cells share tensors without grad, such as masks."""
        if not tensor.requires_grad:
            return tensor
        i, j = self._frame.i, self._frame.column
        rested = next((rested for laid, rested in self._rested if _is_of(rested, laid, tensor)), None)
        return self._resting.rest(tensor, Action("F", i, j), Action("B", i, j), rested)

    @contextmanager
    def until(self, column: int, value: Any) -> Iterator[None]:
        """Let the tensors in ``value`` rest in a ``with`` block, in which the frame waits for the turn of ``column``.

        They are those that this frame has made, if it stays on one device.
        """
        i, j = self._frame.i, self._frame.column
        self._rested = []
        laid: list[tuple[Tensor, Rested]] = []
        if self._computing[j].device == self._computing[column].device:
            tensors = {storage_key(tensor): tensor for _, tensor in each(value) if tensor.requires_grad}
            for key, tensor in tensors.items():
                base = tensor if tensor._base is None else tensor._base
                storage = tensor.untyped_storage()
                # Of a part, only that part would come back; memory of DLPack or a CUDA graph is not PyTorch's to free.
                is_all = tensor.nbytes == storage.nbytes() and storage.resizable()
                if is_all and key not in self._callers and base.grad_fn is not None:
                    rested = self._resting.rest(tensor, Action("F", i, j), Action("F", i, column), empties=True)
                    if isinstance(rested, Rested):
                        laid.append((tensor, rested))
        try:
            yield
        finally:
            with self._computing[column].use() if laid else nullcontext():
                for tensor, rested in laid:
                    rested.restore(tensor)
            self._rested = laid

    def end(self) -> None:
        """Forget all: modules that run again may hold this object."""
        self._rested = []


def _is_of(rested: Rested, laid: Tensor, tensor: Tensor) -> bool:
    """Return whether a tensor has the elements of the one that has rested, none of them changed in place since."""
    return (
        storage_key(laid) == storage_key(tensor)
        and (laid.storage_offset(), laid.size(), laid.stride())
        == (tensor.storage_offset(), tensor.size(), tensor.stride())
        and versions([laid, tensor]) == [rested.version] * 2
    )
