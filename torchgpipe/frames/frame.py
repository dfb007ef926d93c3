"""A frame: the run of the model's own forward on one micro-batch, which stops where a column begins.

Each frame has a thread while it runs, whose stack keeps the state of the model's forward between two cells. The worker
of a device and a frame take turns, so that only one of the two runs:

    worker of device 0     F(0,0)──┐      ┌─►F(1,0)──┐
    frame 0                        └─ ... ┘          │         runs until it calls a module of column 1, and stops
    frame 1                                          └─ ...
    worker of device 1                    F(0,1)──┐            lets frame 0 go on
    frame 0                                       └─ ...       until it calls a module of column 2, or ends

A pipeline with one column needs no threads: its frames run in the thread that asks.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch

from torchgpipe.devices.torch_internals import next_sequence_number, sequence_number
from torchgpipe.frames.columns import Columns
from torchgpipe.frames.threads import Threads, place_of, seconds_of
from torchgpipe.listener.listener import End
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.generator_locks import own_locks

__all__ = ["Cancelled", "Frame", "WaitsForever"]


class Cancelled(BaseException):
    """Unwinds the stack of a frame that will not go on, because the mini-batch has failed elsewhere."""


class WaitsForever(RuntimeError):
    """A micro-batch waits for what an earlier one holds, which has stopped where a partition begins."""


class Frame:
    """A micro-batch on its way through the model.

    Args:
        i: the micro-batch
        run: runs the model; it calls `pause_until` at each boundary, in this frame's thread
        ambient: the settings of the caller
        threads: where frames run; None if they run in the thread that asks
        columns: where the columns compute, and who listens

    Attributes:
        i: the micro-batch
        column: the column whose turn it is
        module: the name of the module of the spine that was called last, for errors; '' before the first call
    """

    def __init__(
        self,
        i: int,
        run: Callable[[Frame], None],
        ambient: Ambient,
        threads: Threads | None,
        columns: Columns,
    ) -> None:
        self.i = i
        self.column = 0
        self.module = ""
        self._finished = False
        self._run = run
        self._ambient = ambient
        self._wanted = 0
        self._error: BaseException | None = None
        self._cancelled = False
        self._threads = threads
        self._columns = columns
        self._end: End | None = None
        self._started = False
        self._ident = 0
        # The baton between worker and frame, in both directions: half the time of a condition.
        self._turn: SimpleQueue[None] = SimpleQueue()
        self._pause: SimpleQueue[None] = SimpleQueue()
        #: Held by the thread while it runs.
        self._working = threading.Lock()
        #: The columns that were entered, and for each, the sequence number of the first autograd node made there.
        self._entered: list[int] = []
        self._starts: list[int] = []

    def advance(self, j: int) -> None:
        """Let the model run as far as it belongs to column ``j``.

        Raises:
            BaseException: what the model has raised.
        """
        if self._finished or self._wanted > j:
            return  # The frame passes this column by.
        if self._threads is None:
            self._ambient.run(self._go)
            return
        if self._started:
            self._turn.put(None)
        else:
            self._started = True
            self._ident = self._threads.run(self._serve)
        self._await_pause()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # A stack that holds its own exception is a cycle, which would keep tensors alive.

    def _await_pause(self) -> None:
        """Wait until the frame's thread pauses or ends.

        Raises:
            WaitsForever: the thread has only waited for longer than this mini-batch is patient.
        """
        # The first one waits for no other: for a file, perhaps.
        patience, computed = self._columns.patience if self.i else None, -1.0
        while True:
            try:
                return self._pause.get(timeout=patience)
            except Empty:
                before, computed = computed, seconds_of(self._ident)
            if computed == before:
                raise WaitsForever(
                    f"micro-batch {self.i} waits for ever in {place_of(self._ident)}, while earlier ones have stopped "
                    "where a partition begins: perhaps the model holds a lock in its forward, which every micro-batch "
                    "takes; take the lock around the call of the model instead"
                )

    def pause_until(self, j: int) -> None:
        """Stop until it is the turn of column ``j``; called in the frame's own thread."""
        if self._cancelled:  # The model has caught the exception of a cancelled frame.
            raise Cancelled
        if self._threads is not None and j != self.column:
            self._end_work(failed=False)
            self._wanted = j
            self._pause.put(None)
            self._turn.get()
            if self._cancelled:
                raise Cancelled
        self.column = j
        self._starts.append(next_sequence_number())
        self._entered.append(j)

    def begin_work(self) -> None:
        """Tell a listener that the model computes in this column now, unless it has been told."""
        listener = self._columns.listener
        if listener is not None and self._end is None:
            self._end = listener.begin("forward", self.i, self.column, None, self._columns.computing[self.column])

    def _end_work(self, *, failed: bool) -> None:
        if self._end is not None:
            end, self._end = self._end, None
            end(failed)

    def cancel(self) -> None:
        """Unwind the stack of a frame that has not finished, and wait until that is done.

        The frame may be waiting for its turn, or, if `advance` was interrupted, be running or about to start.
        """
        self._cancelled = True
        self._turn.put(None)
        with self._working:
            pass

    def span(self, column: int) -> tuple[int, int]:
        """Return the numbers of the autograd nodes made in a column: the first, and the one behind the last.

        Called in the frame's own thread, when the model's forward has returned.
        """
        if column not in self._entered:
            return 0, 0
        starts = [*self._starts, next_sequence_number()]
        k = self._entered.index(column)
        return starts[k], starts[k + 1]

    def home(self, node: Any) -> int:
        """Return the column in which a node of autograd was made."""
        number = sequence_number(node)
        if number >= self._starts[-1]:
            return self.column
        return self._entered[max(0, bisect_right(self._starts, number) - 1)]

    def _serve(self, leave: Callable[[], None]) -> None:
        """Run in a thread."""
        with self._working:
            try:
                if not self._cancelled:
                    self._ambient.run(self._go)
            except Cancelled:
                pass
            except BaseException as error:
                self._error = error
            finally:
                self._finished = True
                leave()
                self._pause.put(None)

    def _go(self) -> None:
        failed = True
        try:
            # A model that differentiates makes nodes, which have numbers of this thread only if it is this thread.
            with own_locks(), torch.autograd.set_multithreading_enabled(False):
                self.pause_until(0)
                self._run(self)
            failed = False
        finally:
            self._end_work(failed=failed)
            self._finished = True
