"""A thread for each device, so that the devices are fed side by side.

The threads live as long as one call of the pipeline. Idle ones would be in the way of a data loader that forks
processes, and starting them is cheap beside a mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from torchgpipe.ambient import Ambient
from torchgpipe.stream import Stream

__all__ = ["Worker", "start_workers"]

T = TypeVar("T")

_Task = tuple[Callable[..., T], tuple[Any, ...]]


class Worker(Generic[T]):
    """Runs tasks one after the other in a thread of its own, up to the first that fails."""

    def __init__(self) -> None:
        # Queues of the standard library in C: half the time of a future for each hand-over.
        self._tasks: SimpleQueue[_Task[T] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def submit(self, task: Callable[..., T], *args: Any) -> None:
        """Lets the thread run ``task`` after those it already has."""
        self._tasks.put((task, args))

    def result(self) -> T:
        """Waits for the oldest task whose result was not taken; raises what it has raised."""
        result, error = self._outcomes.get()
        if error is not None:
            try:
                raise error
            finally:
                del error  # A frame that holds its own exception is a cycle, and keeps tensors alive.
        return result  # type: ignore[return-value]

    def stop(self) -> None:
        """Lets the thread end after the task that it is at."""
        self._tasks.put(None)

    def serve(self, ambient: Ambient, stream: Stream) -> None:
        """The thread's life."""
        try:
            ambient.run(self._serve, stream)
        except BaseException as error:  # What was to be entered could not be. Somebody waits for a result.
            self._outcomes.put((None, error))

    def _serve(self, stream: Stream) -> None:
        with stream.use():
            while self._serve_one():
                pass

    def _serve_one(self) -> bool:
        # A function of its own, so that nothing is held while the thread waits.
        task = self._tasks.get()
        if task is None:
            return False
        function, args = task
        del task
        try:
            result = function(*args)
        except BaseException as error:
            self._outcomes.put((None, error))
            return False
        self._outcomes.put((result, None))
        return True


@contextmanager
def start_workers(streams: Sequence[Stream], ambient: Ambient) -> Iterator[list[Worker[Any]]]:
    """Starts a thread for each stream's device and gives the worker that belongs to each stream.

    The workers run in ``ambient``, each on its stream. At the end of the block all threads are gone.
    """
    workers = {stream.device: Worker[Any]() for stream in streams}
    first = {stream.device: stream for stream in reversed(streams)}
    with ThreadPoolExecutor(len(workers), thread_name_prefix="torchgpipe") as pool:
        try:
            for device, worker in workers.items():
                pool.submit(worker.serve, ambient, first[device])
            yield [workers[stream.device] for stream in streams]
        finally:
            for worker in workers.values():
                worker.stop()
