"""A frame: the run of the model's own forward on one micro-batch, which stops where a column begins.

Each frame has a thread, whose stack keeps the state of the model's forward between two cells. The worker of a device
and a frame take turns, so that only one of the two runs:

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
from typing import Any

import torch

from torchgpipe.devices.torch_internals import next_sequence_number, sequence_number
from torchgpipe.replay.ambient import Ambient

__all__ = ["Cancelled", "Frame"]


class Cancelled(BaseException):
    """Unwinds the stack of a frame that will not go on, because the mini-batch has failed elsewhere."""


class Frame:
    """A micro-batch on its way through the model.

    Args:
        i: the micro-batch
        run: runs the model; it calls `enter` at each boundary, in this frame's thread
        ambient: the settings of the caller

    Attributes:
        i: the micro-batch
        column: the column whose turn it is
        module: the name of the module of the spine that was called last, for errors
        finished: whether the model's forward has returned
        builds_graph: whether the caller wants a graph
    """

    def __init__(self, i: int, run: Callable[[Frame], None], ambient: Ambient) -> None:
        self.i = i
        self.column = 0
        self.module = ""
        self.finished = False
        self.builds_graph = ambient.builds_graph
        self._run = run
        self._ambient = ambient
        self._wanted = 0
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread: threading.Thread | None = None
        # Each is held except when the other side has handed over. Two locks take half the time of a condition.
        self._turn, self._pause = threading.Lock(), threading.Lock()
        #: For each column that was entered, the sequence number of the first autograd node that belongs to it.
        self._starts: list[int] = []
        self._columns: list[int] = []

    def advance(self, j: int, *, threaded: bool) -> None:
        """Let the model run as far as it belongs to column ``j``.

        Raises:
            BaseException: what the model has raised.
        """
        if self.finished or self._wanted > j:
            return  # The frame passes this column by.
        if not threaded:
            self._ambient.run(self._go)
            return
        if self._thread is None:
            self._turn.acquire()
            self._pause.acquire()
            self._thread = threading.Thread(target=self._serve, name=f"torchgpipe micro-batch {self.i}")
            self._thread.start()
        else:
            self._turn.release()
        self._pause.acquire()
        if self.finished:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # A stack that holds its own exception is a cycle, which would keep tensors alive.

    def enter(self, j: int) -> None:
        """Stop until it is the turn of column ``j``; called in the frame's own thread."""
        if self._thread is not None and j != self.column:
            self._wanted = j
            self._pause.release()
            self._turn.acquire()
            if self._cancelled:
                raise Cancelled
        self.column = j
        self._starts.append(next_sequence_number())
        self._columns.append(j)

    def cancel(self) -> None:
        """Unwind the stack of a frame that has not finished, and wait for the end of its thread."""
        if self._thread is not None and self._thread.is_alive():
            self._cancelled = True
            self._turn.release()
            self._thread.join()

    def home(self, node: Any) -> int:
        """Return the column in which a node of autograd was made."""
        number = sequence_number(node)
        if number >= self._starts[-1]:
            return self.column
        return self._columns[max(0, bisect_right(self._starts, number) - 1)]

    def _serve(self) -> None:
        """Run as the thread of the frame."""
        # Autocast clears its casts, which all threads share, where its outermost block ends. The caller's is outside.
        torch.autocast_increment_nesting()
        try:
            self._ambient.run(self._go)
        except Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.finished = True
            self._pause.release()

    def _go(self) -> None:
        try:
            self.enter(0)
            self._run(self)
        finally:
            self.finished = True
