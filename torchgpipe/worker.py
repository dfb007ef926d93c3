"""A thread for each device, so that the devices are fed side by side.

The threads live as long as one call of the pipeline. Idle ones would be in the way of a data loader that forks
processes, and starting them is cheap beside a mini-batch.

They drive the schedule among themselves: who is the last to finish a step hands out the next one, while the caller
sleeps until the end. Every change of threads is time in which the host does nothing for any device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch

from torchgpipe.ambient import Ambient
from torchgpipe.stream import Stream

__all__ = ["run_in_workers"]

Cell = tuple[int, int]


def run_in_workers(
    steps: Iterable[Sequence[Cell]], run: Callable[[int, int], None], streams: Sequence[Stream], ambient: Ambient
) -> None:
    """Runs the cells of each step side by side, and one step after the other.

    Args:
        steps: cells (i, j), in the order of the schedule
        run: runs the cell (i, j)
        streams: the stream of each partition j; the threads are those of their devices
        ambient: what the threads run in, each on its stream

    Raises:
        BaseException: what the first cell that failed has raised. Cells of later steps have not started.
    """
    error = _Crew(steps, run, streams).work(ambient)
    if error is not None:
        try:
            raise error
        finally:
            del error  # A frame that holds its own exception is a cycle, and keeps tensors alive.


class _Worker:
    """The end of a thread at which its cells arrive."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        # A queue of the standard library in C: half the time of a future for each hand-over.
        self.cells: SimpleQueue[Cell | None] = SimpleQueue()
        self.failed = False


class _Crew:
    """The workers of one call."""

    def __init__(
        self, steps: Iterable[Sequence[Cell]], run: Callable[[int, int], None], streams: Sequence[Stream]
    ) -> None:
        self._steps = iter(steps)
        self._run = run
        self._workers: dict[torch.device, _Worker] = {}
        for stream in streams:
            self._workers.setdefault(stream.device, _Worker(stream))
        self._by_partition = [self._workers[stream.device] for stream in streams]
        self._step: Sequence[Cell] = ()
        self._pending = 0
        self._pending_lock = threading.Lock()
        self._errors: dict[Cell, BaseException] = {}
        self._outcome: SimpleQueue[BaseException | None] = SimpleQueue()

    def work(self, ambient: Ambient) -> BaseException | None:
        """Runs all steps, or those up to the first with an error, which is returned. All threads are gone then."""
        with ThreadPoolExecutor(len(self._workers), thread_name_prefix="torchgpipe") as pool:
            try:
                for worker in self._workers.values():
                    pool.submit(self._serve, worker, ambient)
                self._hand_out()
                return self._outcome.get()
            finally:
                for worker in self._workers.values():
                    worker.cells.put(None)

    def _serve(self, worker: _Worker, ambient: Ambient) -> None:
        """A thread's life."""
        try:
            ambient.run(self._serve_all, worker)
        except BaseException as error:  # What was to be entered could not be. Somebody waits for an outcome.
            self._outcome.put(error)

    def _serve_all(self, worker: _Worker) -> None:
        with worker.stream.use():
            while (cell := worker.cells.get()) is not None:
                self._serve_one(worker, *cell)

    def _serve_one(self, worker: _Worker, i: int, j: int) -> None:
        if not worker.failed:
            try:
                self._run(i, j)
            except BaseException as error:
                worker.failed = True
                self._errors[i, j] = error
        with self._pending_lock:
            self._pending -= 1
            is_last = self._pending == 0
        if is_last:
            self._hand_out()

    def _hand_out(self) -> None:
        """Goes on to the next step, if there is one and the last one went well."""
        errors = [self._errors[cell] for cell in self._step if cell in self._errors]
        self._errors.clear()  # They know the frames they come from, and so this object.
        step = next(self._steps, None)
        if errors or step is None:
            self._outcome.put(errors[0] if errors else None)
            return
        self._step, self._pending = step, len(step)
        for cell in step:
            self._by_partition[cell[1]].cells.put(cell)
