"""Coroutines in threads: a function runs in a thread of its own, stops where it says, and goes on later.

Only one of the two runs, the function or whoever resumes it. Starting a thread takes as long as a small cell, so a
function that has ended leaves its thread to a later one: a mini-batch has as many threads as frames are under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch

from torchgpipe.devices.interrupts import join, uninterrupted
from torchgpipe.devices.torch_internals import frame_of

__all__ = ["Cancelled", "Coroutine", "Threads", "WaitsForever", "place_of", "seconds_of"]


class Cancelled(BaseException):
    """Unwinds the stack of a function that will not go on, because the mini-batch has failed elsewhere."""


class WaitsForever(RuntimeError):
    """A micro-batch waits for what an earlier one holds, which has stopped where a partition begins."""


class Coroutine:
    """A function that takes turns with those that resume it.

    Args:
        threads: where it runs
        i: the number of the micro-batch that runs, for errors
        patience: the seconds after which it is taken to wait for ever, if it only waits; None for no limit

    Attributes:
        has_ended: whether the function has returned, or raised
    """

    def __init__(self, threads: Threads, i: int, patience: float | None) -> None:
        self.has_ended = False
        self._threads, self._i, self._patience = threads, i, patience
        self._ident: int | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        # The baton, in both directions: half the time of a condition.
        self._turn: SimpleQueue[None] = SimpleQueue()
        self._pause: SimpleQueue[None] = SimpleQueue()
        #: Held by the thread while it runs.
        self._working = threading.Lock()

    def resume(self, function: Callable[[], None]) -> None:
        """Begin to run the function, or let it go on, until it pauses or ends.

        Raises:
            WaitsForever: the function has only waited for longer than ``patience``.
            BaseException: what the function has raised.
        """
        if self._ident is None:
            self._ident = self._threads.begin(self, function)
        else:
            self._turn.put(None)
        self._await_pause()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # A stack that holds its own exception is a cycle, which would keep tensors alive.

    def _await_pause(self) -> None:
        computed = -1.0
        while True:
            try:
                return self._pause.get(timeout=self._patience)
            except Empty:
                assert self._ident is not None
                before, computed = computed, seconds_of(self._ident)
            if computed == before:
                raise WaitsForever(
                    f"micro-batch {self._i} waits for ever in {place_of(self._ident)}, while earlier ones have stopped "
                    "where a partition begins: perhaps the model holds a lock in its forward, which every micro-batch "
                    "takes; take the lock around the call of the model instead"
                )

    def pause(self) -> None:
        """Stop until `resume`; called by the function."""
        if not self._cancelled:  # Else the model has caught the exception of a cancelled frame.
            self.hand_back()
            self._turn.get()
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Unwind the stack of the function if it has not ended, and wait until that is done.

        The function may have paused, or, if `resume` was interrupted, be running or about to start.
        """
        self._cancelled = True
        self._turn.put(None)
        with self._working:
            pass

    def serve(self, function: Callable[[], None]) -> None:
        """Run the function to its end, in the thread that has it; `hand_back` follows."""
        with self._working:
            try:
                if not self._cancelled:
                    function()
            except Cancelled:
                pass
            except BaseException as error:
                self._error = error
            finally:
                self.has_ended = True

    def hand_back(self) -> None:
        """Let the one that has resumed the function go on."""
        self._pause.put(None)


class Threads:
    """The threads of a mini-batch."""

    def __init__(self) -> None:
        self._all: list[_Thread] = []
        self._idle: list[_Thread] = []

    def begin(self, coroutine: Coroutine, function: Callable[[], None]) -> int:
        """Run a coroutine in a thread, and return the number of the thread.

        Raises:
            RuntimeError: no thread could be started.
        """
        if self._idle:
            thread = self._idle.pop()
        else:
            thread = _Thread(self._idle, len(self._all))
            self._all.append(thread)
            thread.start()
        thread.taken.put((coroutine, function))
        assert thread.ident is not None
        return thread.ident

    def close(self) -> None:
        """End all threads, whose functions have ended."""
        uninterrupted(self._close)

    def _close(self) -> None:
        for thread in self._all:
            thread.taken.put(None)
        join(self._all)


class _Thread(threading.Thread):
    def __init__(self, idle: list[_Thread], number: int) -> None:
        super().__init__(name=f"torchgpipe frame {number}")
        self._idle = idle
        #: What to run; None to end.
        self.taken: SimpleQueue[tuple[Coroutine, Callable[[], None]] | None] = SimpleQueue()

    def run(self) -> None:
        # PyTorch tells OpenMP how many threads to use in this thread when it first needs to know, and a matrix product
        # does not ask: as the first operation, it would take all cores, and round otherwise than in other threads.
        torch.get_num_threads()
        # Autocast clears its casts, which all threads share, where its outermost block ends. The caller's is outside.
        torch.autocast_increment_nesting()
        while (taken := self.taken.get()) is not None:
            coroutine, function = taken
            coroutine.serve(function)
            self._idle.append(self)
            coroutine.hand_back()
            del taken, coroutine, function  # They would keep the frame alive while the thread waits.


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
