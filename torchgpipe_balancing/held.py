"""Count the bytes that autograd holds for backward; each memory counts once."""

from __future__ import annotations

from weakref import WeakSet

from torch import Tensor

from torchgpipe.devices.memory import storages_of

__all__ = ["Saved", "SavedTensors"]


class Saved:
    """A tensor that autograd has saved, as long as it holds it."""

    def __init__(self, tensor: Tensor) -> None:
        # Detached, because an operation that saves its output would otherwise hold itself.
        self.tensor = tensor.detach()


class SavedTensors:
    """What autograd has saved in one place, by hooks for saved tensors."""

    def __init__(self) -> None:
        self._alive = WeakSet[Saved]()

    def pack(self, tensor: Tensor) -> Saved:
        """Return what autograd holds in place of a tensor."""
        saved = Saved(tensor)
        self._alive.add(saved)
        return saved

    def memories(self) -> dict[int, int]:
        """Return the bytes of each memory that autograd still holds."""
        return storages_of([saved.tensor for saved in self._alive])
