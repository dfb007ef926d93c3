"""Keep the skips in flight, for the layers that run in a thread.

The current tracker is bound to the thread, and not to a context variable. Threads that start in copies of one context,
such as those of asyncio, would share the skips of plain models. And the autograd graph keeps contexts for
recomputation, which would keep orphaned skips alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.skip.namespace import SkipKey

__all__ = ["SkipTracker", "current_skip_tracker"]


class SkipTracker:
    """Hold every skip from its stash to its pop, and no longer.

    A cell enters a tracker of its own, with the skips that have arrived for the cell. Outside a pipeline, each thread
    has one tracker for all layers that run in the thread.

    Args:
        arrived: skips that were stashed in other cells

    Attributes:
        skips: the skips in flight
    """

    def __init__(self, arrived: Iterable[tuple[SkipKey, Leaf]] = ()) -> None:
        self.skips = dict(arrived)

    def stash(self, key: SkipKey, tensor: Leaf, layer: Any) -> None:
        """Hold a skip that ``layer`` has stashed."""
        self.skips[key] = tensor

    def pop(self, key: SkipKey) -> Leaf:
        """Return a skip, and hold it no longer.

        Raises:
            KeyError: the skip is not in flight.
        """
        return self.skips.pop(key)

    def take(self, keys: Iterable[SkipKey]) -> Leaves:
        """Return skips that other cells pop, and hold them no longer."""
        return tuple([self.skips.pop(key) for key in keys])

    def __enter__(self) -> None:
        self._outer = _current.tracker
        _current.tracker = self

    def __exit__(self, *_: object) -> None:
        _current.tracker = self._outer


class _ThreadTracker(SkipTracker):
    """Hold the skips of plain models.

    A cell's tracker ends with the cell. Here a call that fails between a stash and its pop cannot be detected. So an
    orphaned skip lives until its layer stashes again, or until the layer is garbage collected.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[SkipKey, weakref.ref[Any]] = {}

    def stash(self, key: SkipKey, tensor: Leaf, layer: Any) -> None:
        super().stash(key, tensor, layer)
        skips = self.skips  # The callback must not refer to the tracker: that would be a cycle.
        self._layers[key] = weakref.ref(layer, lambda _: skips.pop(key, None))

    def pop(self, key: SkipKey) -> Leaf:
        self._layers.pop(key, None)
        return super().pop(key)


class _CurrentTracker(threading.local):
    tracker: SkipTracker

    def __init__(self) -> None:  # for each thread
        self.tracker = _ThreadTracker()


_current = _CurrentTracker()


def current_skip_tracker() -> SkipTracker:
    """Return the tracker of the layers that run in this thread."""
    return _current.tracker
