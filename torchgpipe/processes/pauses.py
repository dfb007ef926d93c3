"""What pauses until another process tells it something, and goes on while its own process waits for anything else.

A process with several columns passes through each micro-batch more than once. Standing in one of them until it hears
from another process, it could keep from that process what this one waits for:

    process 0   F(2, 0)  waits for the shapes that column 1 returns ─────────────────────────────┐
    process 1   B(0, 1)  waits for a gradient of B(0, 2), which process 0 runs behind F(2, 0)     F(2, 1)  tells them

So F(2, 0) ends in front of the wait. Behind it may be what process 1 needs before it tells anything else, such as
another tensor for F(2, 1). So whoever waits for a message lets go on what has been told meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Pauses", "in_background"]

T = TypeVar("T")

#: The seconds between two looks at whether anything was told.
_LOOK = 0.0005


def in_background(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread of its own: what waits for a message of gloo, nobody can wake."""
    future = Future[T]()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    _Waiting(target=call, name="torchgpipe waits", daemon=True).start()
    return future


class _Waiting(threading.Thread):
    """A thread that only waits: what has paused goes on in the turn of a worker."""


class Pauses:
    """What has paused in a process.

    Attributes:
        by_others: whether something may pause while a thread waits that has seen no pause
    """

    def __init__(self) -> None:
        self.by_others = False
        #: What has paused, with what it is told, and what lets it go on.
        self._paused: dict[Hashable, tuple[Future[Any], Callable[[], None]]] = {}
        self._going_on = threading.Lock()

    def pause(self, what: Hashable, told: Future[Any], go_on: Callable[[], None]) -> None:
        """Note what pauses until it is told something; ``go_on`` returns when it has paused again, or ended."""
        self._paused[what] = told, go_on

    def forget(self, what: Hashable) -> None:
        """Forget what was cancelled."""
        self._paused.pop(what, None)

    def end(self, what: Hashable, is_enough: Callable[[], bool]) -> None:
        """Wait until something has paused no more, or has come so far that it is enough; let all go on meanwhile."""
        self._until(lambda: what not in self._paused or is_enough())

    def wait(self, function: Callable[[], T]) -> T:
        """Return what a function returns that waits for another process, and let all go on meanwhile."""
        if isinstance(threading.current_thread(), _Waiting) or not (self._paused or self.by_others):
            return function()
        future = in_background(function)
        self._until(future.done)
        return future.result()

    def _until(self, has_come: Callable[[], bool]) -> None:
        while not has_come():
            if self._going_on.acquire(blocking=False):
                try:
                    self._go_on()
                finally:
                    self._going_on.release()
            time.sleep(_LOOK)

    def _go_on(self) -> None:
        for what, (told, go_on) in [*self._paused.items()]:
            if told.done():
                try:
                    go_on()
                finally:
                    if self._paused.get(what, (None,))[0] is told:  # Else it has paused again.
                        del self._paused[what]
