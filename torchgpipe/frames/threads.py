"""The threads of the frames of a mini-batch: a frame that has finished leaves its thread to a later one.

Starting a thread takes as long as a small cell. So a mini-batch has as many threads as frames are under way at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

import torch

from torchgpipe.devices.interrupts import join, uninterrupted
from torchgpipe.devices.torch_internals import frame_of

__all__ = ["Threads", "place_of", "seconds_of"]

#: What a thread runs. When it has finished, it calls its argument, which leaves the thread to others.
_Work: TypeAlias = Callable[[Callable[[], None]], None]


class Threads:
    """The threads of a mini-batch."""

    def __init__(self) -> None:
        self._all: list[_Thread] = []
        self._idle: list[_Thread] = []

    def run(self, work: _Work) -> int:
        """Run ``work`` in a thread, and return the number of the thread.

        Raises:
            RuntimeError: no thread could be started.
        """
        if self._idle:
            thread = self._idle.pop()
        else:
            thread = _Thread(self._idle, len(self._all))
            self._all.append(thread)
            thread.start()
        thread.take(work)
        assert thread.ident is not None
        return thread.ident

    def close(self) -> None:
        """End all threads, whose frames have finished."""
        uninterrupted(self._close)

    def _close(self) -> None:
        for thread in self._all:
            thread.take(None)
        join(self._all)


class _Thread(threading.Thread):
    def __init__(self, idle: list[_Thread], number: int) -> None:
        super().__init__(name=f"torchgpipe frame {number}")
        self._idle = idle
        self._taken: SimpleQueue[_Work | None] = SimpleQueue()

    def take(self, work: _Work | None) -> None:
        """Give the thread work, or let it end."""
        self._taken.put(work)

    def run(self) -> None:
        # PyTorch tells OpenMP how many threads to use in this thread when it first needs to know, and a matrix product
        # does not ask: as the first operation, it would take all cores, and round otherwise than in other threads.
        torch.get_num_threads()
        # Autocast clears its casts, which all threads share, where its outermost block ends. The caller's is outside.
        torch.autocast_increment_nesting()
        while (work := self._taken.get()) is not None:
            work(lambda: self._idle.append(self))
            del work  # It would keep the frame alive while the thread waits.


def seconds_of(ident: int) -> float:
    """Return the seconds that a thread has computed; 0 where the platform does not tell."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    return 0.0 if clock_of is None else time.clock_gettime(clock_of(ident))


def place_of(ident: int) -> str:
    """Return the place in the code where a thread is, outside of this library and of Python's own ``threading``."""
    frame = frame_of(ident)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torchgpipe", "threading"):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
