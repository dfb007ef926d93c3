"""A thread for each device, so that the devices are fed side by side.

A worker runs the tasks of its device in their order, and starts a task once all tasks that it needs have finished.
For the cells of a forward pass:

    worker 0   (0,0)──┐(1,0)──┐(2,0)──┐           (i,j) needs (i,j-1), whose output it takes,
    worker 1          └►(0,1)─└►(1,1)─└►(2,1)     and follows the cell before it on its own device

The order of the tasks on a device never depends on which device is faster.

A worker sends the number of a finished task to the workers that wait for the task. Threads live as long as one call of
the pipeline: idle threads would disturb a data loader that forks processes, and starting threads is cheap beside a
mini-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

import torch

from torchgpipe.devices.interrupts import join, uninterrupted
from torchgpipe.devices.stream import Stream
from torchgpipe.replay.ambient import Ambient

__all__ = ["Task", "run_in_workers"]


class Task(NamedTuple):
    """A part of the work of one device.

    Attributes:
        stream: where it computes; its device has a worker
        needs: the numbers of the tasks that must have finished
    """

    stream: Stream
    needs: Sequence[int]


def run_in_workers(tasks: Sequence[Task], run: Callable[[int], None], ambient: Ambient) -> None:
    """Run every task in the worker of its device.

    Args:
        tasks: the tasks, each behind the tasks that it needs. The number of a task is its position.
        run: runs the task of a number
        ambient: the settings that the workers run in, each on the stream of its first task

    Raises:
        BaseException: the error of the first task that failed, in the order of ``tasks``. All tasks before it have run.
    """
    error = _Crew(tasks, run).work(ambient)
    if error is not None:
        try:
            raise error
        finally:
            del error  # A frame that holds its own exception is a cycle, which would keep tensors alive.


class _Worker:
    """The tasks of a device, and the messages to its thread.

    Attributes:
        stream: where the tasks compute
        tasks: the number of each task, with the numbers of the tasks on other devices that it needs
        inbox: receives the numbers of finished tasks
        working: held by the thread while it runs
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.tasks: list[tuple[int, list[int]]] = []
        # A queue of the standard library in C: half the time of a future for each message.
        self.inbox: SimpleQueue[int] = SimpleQueue()
        self.working = threading.Lock()


class _Crew:
    """The workers of one call."""

    def __init__(self, tasks: Sequence[Task], run: Callable[[int], None]) -> None:
        self._run = run
        #: Tasks from this number on must not run: the lowest number of a task that failed, once a task has failed.
        self._end = len(tasks)
        self._errors: dict[int, BaseException] = {}
        self._errors_lock = threading.Lock()
        self._workers: dict[torch.device, _Worker] = {}
        #: By task, the workers that wait for it.
        self._waiting: list[list[_Worker]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            worker = self._workers.setdefault(task.stream.device, _Worker(task.stream))
            foreign = [need for need in task.needs if tasks[need].stream.device != task.stream.device]
            for need in foreign:
                self._waiting[need].append(worker)
            worker.tasks.append((number, foreign))
        #: Autocast has one cache for all threads. The first worker to leave would clear it, so workers leave together.
        self._leaving = threading.Barrier(len(self._workers))
        #: Receives something from each worker that has finished. Why the caller waits for that: see `interrupts`.
        self._left: SimpleQueue[None] = SimpleQueue()

    def work(self, ambient: Ambient) -> BaseException | None:
        """Run all tasks up to the first that fails, and return the error of that task, if any. No thread is left."""
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
            for _ in crew:
                self._left.get()
        except BaseException:  # The caller was interrupted, or a thread could not start.
            uninterrupted(self._abandon)
            raise
        finally:
            if share is not None:
                # Threads that start later would get the number that the workers have set.
                torch.set_num_threads(threads)
            join(crew)
        errors, self._errors = self._errors, {}  # An error holds its frames, and these hold this object: a cycle.
        return errors[min(errors)] if errors else None

    def _abandon(self) -> None:
        """Wait until no worker runs. One whose thread has yet to begin will do nothing."""
        self._stop(0)
        self._leaving.abort()
        for worker in self._workers.values():
            with worker.working:
                pass

    def _share_of_cores(self, threads: int) -> int | None:
        """Return how many threads a layer may use in a worker of the CPU; None if there is no need to share.

        Workers that all use every core would wait for each other's threads, which spin on the cores meanwhile.
        """
        sharing = sum(device.type == "cpu" for device in self._workers)
        return max(1, threads // sharing) if sharing > 1 and threads > 1 else None

    def _serve(self, worker: _Worker, ambient: Ambient, share: int | None) -> None:
        """Run as the thread of a worker."""
        with worker.working:
            try:
                if self._leaving.broken:
                    return
                if share is not None and worker.stream.device.type == "cpu":
                    torch.set_num_threads(share)
                torch.get_num_threads()  # As in `Threads`: a matrix product may be the first thing here, too.
                ambient.run(self._serve_tasks, worker)
            except BaseException as error:  # Other workers wait for the tasks of this one, so they must be told.
                self._fail(-1, error)
                self._leaving.abort()
            finally:
                self._left.put(None)

    def _serve_tasks(self, worker: _Worker) -> None:
        with worker.stream.use():
            self._run_tasks(worker)
            with suppress(threading.BrokenBarrierError):
                self._leaving.wait()

    def _run_tasks(self, worker: _Worker) -> None:
        finished: set[int] = set()
        for number, needs in worker.tasks:
            for need in needs:
                while need not in finished and number < self._end:
                    finished.add(worker.inbox.get())
            if number >= self._end:
                return
            try:
                self._run(number)
            except BaseException as error:
                self._fail(number, error)
                return
            for waiting in self._waiting[number]:
                waiting.inbox.put(number)

    def _fail(self, number: int, error: BaseException) -> None:
        with self._errors_lock:
            self._errors[number] = error
        self._stop(number)

    def _stop(self, end: int) -> None:
        """Let no task start from number ``end`` on, and wake the workers, which may wait for such a task."""
        with self._errors_lock:
            self._end = min(self._end, end)
        for worker in self._workers.values():
            worker.inbox.put(end)
