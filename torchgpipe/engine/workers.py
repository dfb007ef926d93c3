"""A thread for each device, so that the devices are fed side by side.

A worker runs the cells of its device in the order of the schedule, and starts a cell as soon as everything that the
cell needs is finished:

    worker 0   (0,0)──┐(1,0)──┐(2,0)──┐           (i,j) needs (i,j-1), whose output it takes,
    worker 1          └►(0,1)─└►(1,1)─└►(2,1)     and follows the cell before it on its own device

The order of the cells on a device never depends on which device is faster. Cells that share a random number generator
run in turn: each of them also needs the cell before it in the order of the schedule, on whichever device.

A worker sends the number of a finished cell to the workers that wait for the cell. Threads live as long as one call of
the pipeline: idle threads would disturb a data loader that forks processes, and starting threads is cheap beside a
mini-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import torch

from torchgpipe.devices.stream import Stream
from torchgpipe.replay.ambient import Ambient

__all__ = ["run_in_workers"]

Cell = tuple[int, int]


def run_in_workers(
    cells: Iterable[Cell],
    run: Callable[[int, int], None],
    streams: Sequence[Stream],
    ambient: Ambient,
    in_turn: Collection[torch.device] = (),
) -> None:
    """Run every cell in the worker of its device.

    Args:
        cells: cells (i, j), in the order of the schedule
        run: runs the cell (i, j)
        streams: the stream of each partition j; there is a worker for each device among them
        ambient: what the workers run in, each on its stream
        in_turn: the devices whose cells run one at a time

    Raises:
        BaseException: the error of the first cell that failed, in the order of the schedule. All cells before that
            cell have run.
    """
    error = _Crew(list(cells), run, streams, in_turn).work(ambient)
    if error is not None:
        try:
            raise error
        finally:
            del error  # A frame that holds its own exception is a cycle, which would keep tensors alive.


class _Worker:
    """The cells of a device, and the messages to its thread.

    Attributes:
        stream: where the cells compute
        cells: the number of each cell, with the numbers of the cells on other devices that it needs
        inbox: receives the numbers of finished cells
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.cells: list[tuple[int, list[int]]] = []
        # A queue of the standard library in C: half the time of a future for each message.
        self.inbox: SimpleQueue[int] = SimpleQueue()


class _Crew:
    """The workers of one call. The number of a cell is its position in the order of the schedule."""

    def __init__(
        self,
        cells: list[Cell],
        run: Callable[[int, int], None],
        streams: Sequence[Stream],
        in_turn: Collection[torch.device],
    ) -> None:
        self._cells = cells
        self._run = run
        #: Cells from this number on must not run: the lowest number of a cell that failed, once a cell has failed.
        self._end = len(cells)
        self._errors: dict[int, BaseException] = {}
        self._errors_lock = threading.Lock()
        self._workers: dict[torch.device, _Worker] = {}
        for stream in streams:
            self._workers.setdefault(stream.device, _Worker(stream))
        #: By cell, the workers that wait for it.
        self._waiting: list[list[_Worker]] = [[] for _ in cells]
        #: Autocast has one cache for all threads. The first worker to leave would clear it, so workers leave together.
        self._leaving = threading.Barrier(len(self._workers))
        self._divide([self._workers[stream.device] for stream in streams], in_turn)

    def _divide(self, worker_of: Sequence[_Worker], in_turn: Collection[torch.device]) -> None:
        """Give each worker its cells, and note which worker waits for which cell."""
        numbers: dict[Cell, int] = {}
        turn: int | None = None  # the last cell that ran in turn
        for number, (i, j) in enumerate(self._cells):
            numbers[i, j] = number
            worker = worker_of[j]
            needs = [] if j == 0 else [numbers[i, j - 1]]
            if worker.stream.device in in_turn:
                # The cell before it in turn may also be the cell that it needs: one message is enough.
                needs = [need for need in needs if worker_of[j - 1].stream.device not in in_turn]
                needs += [] if turn is None else [turn]
                turn = number
            foreign = [need for need in needs if worker_of[self._cells[need][1]] is not worker]
            for need in foreign:
                self._waiting[need].append(worker)
            worker.cells.append((number, foreign))

    def work(self, ambient: Ambient) -> BaseException | None:
        """Run all cells up to the first that fails, and return the error of that cell, if any. No thread is left."""
        threads = torch.get_num_threads()
        share = self._share_of_cores(threads)
        crew = [
            threading.Thread(
                target=self._serve, args=(worker, ambient, share), name=f"torchgpipe {worker.stream.device}"
            )
            for worker in self._workers.values()
        ]
        try:
            for thread in crew:
                thread.start()
            for thread in crew:
                thread.join()
        except BaseException:  # The caller was interrupted, or a thread could not start.
            self._stop(0)
            self._leaving.abort()
            for thread in crew:
                if thread.ident is not None:
                    thread.join()
            raise
        finally:
            if share is not None:
                # Threads that start later would get the number that the workers have set.
                torch.set_num_threads(threads)
        errors, self._errors = self._errors, {}  # An error holds its frames, and these hold this object: a cycle.
        return errors[min(errors)] if errors else None

    def _share_of_cores(self, threads: int) -> int | None:
        """Return how many threads a layer may use in a worker of the CPU; None if there is no need to share.

        Workers that all use every core would wait for each other's threads, which spin on the cores meanwhile.
        """
        sharing = sum(device.type == "cpu" for device in self._workers)
        return max(1, threads // sharing) if sharing > 1 and threads > 1 else None

    def _serve(self, worker: _Worker, ambient: Ambient, share: int | None) -> None:
        """Run as the thread of a worker."""
        try:
            if share is not None and worker.stream.device.type == "cpu":
                torch.set_num_threads(share)
            ambient.run(self._serve_cells, worker)
        except BaseException as error:  # Other workers wait for the cells of this one, so they must be told.
            self._fail(-1, error)
            self._leaving.abort()

    def _serve_cells(self, worker: _Worker) -> None:
        with worker.stream.use():
            self._run_cells(worker)
            with suppress(threading.BrokenBarrierError):
                self._leaving.wait()

    def _run_cells(self, worker: _Worker) -> None:
        finished: set[int] = set()
        for number, needs in worker.cells:
            for need in needs:
                while need not in finished and number < self._end:
                    finished.add(worker.inbox.get())
            if number >= self._end:
                return
            try:
                self._run(*self._cells[number])
            except BaseException as error:
                self._fail(number, error)
                return
            for other in self._waiting[number]:
                other.inbox.put(number)

    def _fail(self, number: int, error: BaseException) -> None:
        with self._errors_lock:
            self._errors[number] = error
        self._stop(number)

    def _stop(self, end: int) -> None:
        """Let no cell start from number ``end`` on, and wake the workers, which may wait for such a cell."""
        with self._errors_lock:
            self._end = min(self._end, end)
        for worker in self._workers.values():
            worker.inbox.put(end)
