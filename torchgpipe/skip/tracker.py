"""Which skips are in flight, for the layers that run in this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType

from torchgpipe.skip.namespace import SkipKey
from torchgpipe.typing import Leaf, Leaves

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

    def stash(self, key: SkipKey, tensor: Leaf) -> None:
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


class _Current(threading.local):
    def __init__(self) -> None:  # for each thread
        self.tracker = SkipTracker()


_current = _Current()


def current_skip_tracker() -> SkipTracker:
    """The tracker of the layers that run in this thread."""
    return _current.tracker
