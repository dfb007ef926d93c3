"""What has come from other processes, and what pauses until something comes.

A process with several columns passes through each micro-batch more than once. Standing in one of them until it hears
from another process, it could keep from that process what this one waits for:

    process 0   F(2, 0)  waits for the shapes that column 1 returns ─────────────────────────────┐
    process 1   B(0, 1)  waits for a gradient of B(0, 2), which process 0 runs behind F(2, 0)     F(2, 1)  tells them

So F(2, 0) ends in front of the wait. Behind it may be what process 1 needs before it tells anything else, such as
another tensor for F(2, 1). So whoever waits for a message lets go on what has been told meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Hashable
from typing import TypeAlias

from torch import Tensor

__all__ = ["Inbox"]

#: The sender of a message, and its key.
Place: TypeAlias = tuple[int, bytes]

#: The seconds after which a thread that waits looks whether it has waited for too long.
_LOOK = 0.5


class Inbox:
    """What has come from other processes, and what waits for it.

    Attributes:
        lost: the processes whose connections have ended, each with the reason
    """

    def __init__(self) -> None:
        self.lost: dict[int, str] = {}
        self._messages: dict[Place, deque[Tensor]] = {}
        #: What has paused, with what says whether it was told what it needs, and what lets it go on.
        self._paused: dict[Hashable, tuple[Callable[[], bool], Callable[[], None]]] = {}
        self._going_on = threading.Lock()
        #: How often anything has come or gone on, which wakes those that wait.
        self._changes, self._changed = 0, threading.Condition()

    def __contains__(self, place: Place) -> bool:
        return place in self._messages

    def put(self, place: Place, data: Tensor) -> None:
        """Put here what has come."""
        with self._changed:
            self._messages.setdefault(place, deque()).append(data)
            self._wake()

    def pop(self, place: Place, *, keeps: bool = False) -> Tensor:
        """Return what has come first, and keep it if others ask for it, too."""
        with self._changed:
            came = self._messages[place]
            data = came[0] if keeps else came.popleft()
            if not came:
                del self._messages[place]
        return data

    def forget(self, keys: Container[bytes]) -> None:
        """Forget what was kept."""
        with self._changed:
            for place in [place for place in self._messages if place[1] in keys]:
                del self._messages[place]

    def lose(self, source: int, error: OSError) -> None:
        """Note that a connection has ended."""
        with self._changed:
            self.lost.setdefault(source, str(error))
            self._wake()

    def _wake(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    # -------------------------------------------------------------------------------------------------- what waits

    def pause(self, what: Hashable, is_told: Callable[[], bool], go_on: Callable[[], None]) -> None:
        """Note what pauses until it is told something; ``go_on`` returns when it has paused again, or ended."""
        self._paused[what] = is_told, go_on

    def cancel(self, what: Hashable) -> None:
        """Forget what has paused, and will not go on."""
        self._paused.pop(what, None)

    def end_pause(self, what: Hashable, is_enough: Callable[[], bool]) -> None:
        """Wait until something has paused no more, or has come so far that it is enough."""
        self.until(lambda: what not in self._paused or is_enough())

    def until(self, has_come: Callable[[], bool]) -> None:
        """Wait until a function returns true, and let all go on meanwhile that has been told what it needs."""
        changes = -1
        while not has_come():
            with self._changed:
                self._changed.wait_for(lambda before=changes: self._changes != before, _LOOK)  # type: ignore[misc]
            changes = self._changes
            if self._going_on.acquire(blocking=False):
                try:
                    self._go_on()
                finally:
                    self._going_on.release()

    def _go_on(self) -> None:
        for what, (is_told, go_on) in [*self._paused.items()]:
            if is_told():
                try:
                    go_on()
                finally:
                    if self._paused.get(what, (None,))[0] is is_told:  # Else it has paused again.
                        del self._paused[what]
                    with self._changed:
                        self._wake()
