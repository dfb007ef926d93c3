"""What waits for what: each stream of a pipeline gets a vector clock, and a listener notes the clock behind its work.

Which work runs at the same time, a test cannot rely on. But the clocks tell which work is certain to be finished when
other work begins, on any devices: ``'cpu:0'`` and ``'cpu:1'`` get streams that copy, as if each had its own memory.

    with listening(model) as done:
        model(x)
    assert done[0].precedes(done[1])
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.separate_memory import SeparateMemory, separate_memory
from torchgpipe.devices.stream import Mark, Stream, Tick
from torchgpipe.listener.listener import End

__all__ = ["Clocked", "ClockedStreams", "Done", "Work", "clocked", "listening"]

Clock = dict["Clocked", int]


class Clocked(Stream):
    """A stream with a vector clock: how far each stream is certain to be when this one reaches its present end."""

    in_use = threading.local()

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.device, stream.name)
        self.stream = stream
        self.seen: Clock = {self: 0}

    def __repr__(self) -> str:
        return f"{self.name} of {self.device}"

    def merge(self, seen: Clock) -> None:
        for stream, tick in seen.items():
            self.seen[stream] = max(tick, self.seen.get(stream, 0))

    def mark(self) -> Mark:
        return self.stream.mark(), dict(self.seen)

    def wait(self, mark: Mark) -> None:
        self.stream.wait(mark[0])
        self.merge(mark[1])

    def record(self, tensor: Tensor) -> None:
        self.stream.record(tensor)

    def tick(self) -> Tick:
        return self.stream.tick()

    def seconds(self, start: Tick, end: Tick) -> float:
        return self.stream.seconds(start, end)

    def synchronize(self) -> None:
        self.stream.synchronize()

    @contextmanager
    def use(self) -> Iterator[None]:
        """A copy between devices waits for the current streams of both, and both wait for the copy."""
        outer, self.in_use.stream = getattr(self.in_use, "stream", None), self
        with self.stream.use():
            if outer is not None and outer.name != "computing":
                outer.merge(self.seen)
                outer.seen[outer] += 1
                self.merge(outer.seen)
            try:
                yield
            finally:
                self.in_use.stream = outer


class ClockedStreams(SeparateMemory):
    """The streams of a pipeline, each with a clock. Each device has a memory of its own."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, str], Clocked] = {}

    def _clocked(self, stream: Stream) -> Clocked:
        return self._made.setdefault((stream.device, stream.name), Clocked(stream))

    def current(self, device: torch.device) -> Stream:
        return self._clocked(super().current(device))

    def side(self, device: torch.device, purpose: str) -> Stream:
        return self._clocked(super().side(device, purpose))


class Work:
    """A cell or a copy, and the clock of its stream behind it.

    Attributes:
        kind, i, j, other, stream: as `torchgpipe.listener.listener.Listener.begin` has them
    """

    def __init__(self, kind: str, i: int, j: int, other: int | None, stream: Clocked) -> None:
        self.kind, self.i, self.j, self.other, self.stream = kind, i, j, other, stream

    def end(self, failed: bool) -> None:
        if self.kind != "copy":
            self.stream.seen[self.stream] += 1
        self.seen = dict(self.stream.seen)
        self.tick = self.seen[self.stream]

    def precedes(self, other: Work) -> bool:
        """Return whether this work is certain to be finished when ``other`` begins."""
        return other is not self and other.seen.get(self.stream, 0) >= self.tick


class Done(list[Work]):
    """The work of mini-batches, in the order in which it began: the recorder of a model, and of each mini-batch."""

    def begin_step(self, *_: Any) -> Done:
        return self

    def begin(self, kind: str, i: int, j: int, other: int | None, stream: Any) -> End:
        self.append(Work(kind, i, j, other, stream))
        return self[-1].end


@contextmanager
def clocked(*models: nn.Module, recorder: Any = None) -> Iterator[None]:
    """Give the streams of pipelines clocks for a ``with`` block, and those on ``'cpu:0'``, ... streams that copy."""
    with separate_memory(*models, streams=ClockedStreams(), recorder=recorder):
        yield


@contextmanager
def listening(*models: nn.Module) -> Iterator[Done]:
    """Do the same, and note the work that is done."""
    done = Done()
    with clocked(*models, recorder=done):
        yield done
