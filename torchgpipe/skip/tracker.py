"""Which skips are in flight, for the layers that run in this thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.skip.namespace import SkipKey

__all__ = ["SkipTracker", "current_skip_tracker"]


class SkipTracker:
    """Holds every skip from its stash to its pop, and no longer.

    A cell enters a tracker of its own, with the skips that have arrived for it. Outside a pipeline, each thread
    has one for all the layers that run in it.

    Args:
        arrived: skips that were stashed elsewhere

    Attributes:
        skips: those in flight
    """

    def __init__(self, arrived: Iterable[tuple[SkipKey, Leaf]] = ()) -> None:
        self.skips = dict(arrived)

    def stash(self, key: SkipKey, tensor: Leaf, layer: Any) -> None:
        """Holds a skip that ``layer`` puts away."""
        self.skips[key] = tensor

    def pop(self, key: SkipKey) -> Leaf:
        """Gives a skip away.

        Raises:
            KeyError: it is not in flight.
        """
        return self.skips.pop(key)

    def take(self, keys: Iterable[SkipKey]) -> Leaves:
        """Gives skips away that are popped elsewhere."""
        return tuple([self.skips.pop(key) for key in keys])

    def __enter__(self) -> None:
        self._outer = _current.tracker
        _current.tracker = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _current.tracker = self._outer


class _ThreadTracker(SkipTracker):
    """Holds the skips of plain models.

    A cell's tracker ends with the cell. Here nobody says that a call has failed between a stash and its pop, so a
    skip that was left is held until its layer stashes the next one, and not when the layer itself is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[SkipKey, weakref.ref[Any]] = {}

    def stash(self, key: SkipKey, tensor: Leaf, layer: Any) -> None:
        super().stash(key, tensor, layer)
        skips = self.skips  # and not the tracker, which would be a cycle
        self._layers[key] = weakref.ref(layer, lambda _: skips.pop(key, None))

    def pop(self, key: SkipKey) -> Leaf:
        self._layers.pop(key, None)
        return super().pop(key)


class _Current(threading.local):
    tracker: SkipTracker

    def __init__(self) -> None:  # for each thread
        self.tracker = _ThreadTracker()


_current = _Current()


def current_skip_tracker() -> SkipTracker:
    """The tracker of the layers that run in this thread."""
    return _current.tracker
