"""The threads of the frames of a mini-batch: a frame that has finished leaves its thread to a later one.

Starting a thread takes as long as a small cell. So a mini-batch has as many threads as frames are under way at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["Threads"]


class Threads:
    """The threads of a mini-batch."""

    def __init__(self) -> None:
        self._all: list[_Thread] = []
        self._idle: list[_Thread] = []

    def run(self, work: Callable[[Callable[[], None]], None]) -> None:
        """Run ``work`` in a thread. When it has finished, it calls its argument, which leaves the thread to others."""
        if self._idle:
            thread = self._idle.pop()
        else:
            thread = _Thread(self._idle, len(self._all))
            self._all.append(thread)
            thread.start()
        thread.take(work)

    def close(self) -> None:
        """End all threads, whose frames have finished."""
        for thread in self._all:
            thread.take(None)
        for thread in self._all:
            thread.join()


class _Thread(threading.Thread):
    def __init__(self, idle: list[_Thread], number: int) -> None:
        super().__init__(name=f"torchgpipe frame {number}")
        self._idle = idle
        self._work: Callable[[Callable[[], None]], None] | None = None
        self._given = threading.Lock()
        self._given.acquire()

    def take(self, work: Callable[[Callable[[], None]], None] | None) -> None:
        """Give the thread work, or let it end."""
        self._work = work
        self._given.release()

    def run(self) -> None:
        # Autocast clears its casts, which all threads share, where its outermost block ends. The caller's is outside.
        torch.autocast_increment_nesting()
        while True:
            self._given.acquire()
            work, self._work = self._work, None
            if work is None:
                return
            work(lambda: self._idle.append(self))
            del work  # It would keep the frame alive while the thread waits.
