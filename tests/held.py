"""Count the bytes that are held, where autograd and others hold tensors of a place; each memory counts once."""

from __future__ import annotations

import threading
from collections import Counter

from torch import Tensor

from torchgpipe.devices.memory import storages_of

__all__ = ["HeldBytes", "Saved"]


class HeldBytes:
    """The bytes that are held in one place; each memory counts once.

    Attributes:
        peak: the most bytes so far
    """

    def __init__(self) -> None:
        self.peak = 0
        self._bytes = 0
        self._sizes: dict[int, int] = {}
        self._holders: Counter[int] = Counter()
        # The collector may drop a tensor in the midst of `hold`.
        self._lock = threading.RLock()

    def hold(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, once more."""
        with self._lock:
            for key, size in storages_of([tensor]).items():
                self._holders[key] += 1
                if self._holders[key] == 1:
                    self._sizes[key] = size
                    self._bytes += size
                    self.peak = max(self.peak, self._bytes)

    def drop(self, tensor: Tensor) -> None:
        """Count the memory of a tensor once less."""
        with self._lock:
            for key in storages_of([tensor]):
                self._holders[key] -= 1
                if not self._holders[key]:
                    self._bytes -= self._sizes.pop(key)


class Saved:
    """A tensor that autograd has saved, and where it counts as long as it is saved; perhaps nowhere.

    Hooks for saved tensors wrap each tensor in one of these.
    """

    def __init__(self, tensor: Tensor, place: HeldBytes | None) -> None:
        # Detached, because an operation that saves its output would otherwise hold itself.
        self.tensor = tensor.detach()
        self.place: HeldBytes | None = None
        self.move(place)

    def move(self, place: HeldBytes | None) -> None:
        """Count in another place from now on, or not at all."""
        if place is not None:
            place.hold(self.tensor)
        if self.place is not None:
            self.place.drop(self.tensor)
        self.place = place

    def __del__(self) -> None:
        self.move(None)
