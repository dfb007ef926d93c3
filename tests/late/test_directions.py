"""Activations on their way forward and gradients on their way back are copied at once, each on streams of their own.

What is copied when, a test cannot rely on. But it can see what waits for what: each stream of the pipeline gets a
vector clock, and a listener notes the clock of the stream behind each cell and copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests import late
from torchgpipe import GPipe
from torchgpipe.devices.stream import AcceleratorStream, Mark, Stream, Streams
from torchgpipe.engine.record import End
from torchgpipe.frames.pipelined import runs_of

pytestmark = pytest.mark.late

Clock = dict["Clocked", int]


class Clocked(AcceleratorStream):
    """A stream with a vector clock: how far each stream is certain to be when this one reaches its present end."""

    in_use = threading.local()

    def __init__(self, stream: AcceleratorStream) -> None:
        super().__init__(stream.device, stream.native, stream.name)
        self.seen: Clock = {self: 0}

    def merge(self, seen: Clock) -> None:
        for stream, tick in seen.items():
            self.seen[stream] = max(tick, self.seen.get(stream, 0))

    def mark(self) -> Mark:
        return super().mark(), dict(self.seen)

    def wait(self, mark: Mark) -> None:
        super().wait(mark[0])
        self.merge(mark[1])

    @contextmanager
    def use(self) -> Iterator[None]:
        """A copy between devices waits for the current streams of both, and both wait for the copy."""
        outer, self.in_use.stream = getattr(self.in_use, "stream", None), self
        with super().use():
            if outer is not None and outer.name != "computing":
                outer.merge(self.seen)
                outer.seen[outer] += 1
                self.merge(outer.seen)
            try:
                yield
            finally:
                self.in_use.stream = outer


class ClockedStreams(Streams):
    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, str], Clocked] = {}

    def _clocked(self, stream: Stream) -> Clocked:
        assert isinstance(stream, AcceleratorStream)
        return self._made.setdefault((stream.device, stream.name), Clocked(stream))

    def current(self, device: torch.device) -> Stream:
        return self._clocked(super().current(device))

    def side(self, device: torch.device, purpose: str) -> Stream:
        return self._clocked(super().side(device, purpose))


class Work:
    """A cell or a copy, and the clock of its stream behind it."""

    def __init__(self, kind: str, i: int, j: int, other: int | None, stream: Clocked) -> None:
        self.kind, self.i, self.j, self.other, self.stream = kind, i, j, other, stream

    def end(self, failed: bool) -> None:
        if self.kind != "copy":
            self.stream.seen[self.stream] += 1
        self.seen = dict(self.stream.seen)
        self.tick = self.seen[self.stream]

    def precedes(self, other: Work) -> bool:
        return other is not self and other.seen.get(self.stream, 0) >= self.tick

    def overlaps(self, other: Work) -> bool:
        return not self.precedes(other) and not other.precedes(self)


class Listener:
    """Notes the work of a mini-batch: the recorder of a model, and of each mini-batch."""

    def __init__(self) -> None:
        self.done: list[Work] = []

    def begin_step(self, *_: Any) -> Listener:
        return self

    def begin(self, kind: str, i: int, j: int, other: int | None, stream: Any) -> End:
        work = Work(kind, i, j, other, stream)
        self.done.append(work)
        return work.end


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


M = 6


def of_gpipe(n: int, devices: list[str], schedule: str, listener: Listener) -> Callable[[], Any]:
    layers = nn.Sequential(*[block() for _ in range(n)])
    model = GPipe(layers, [1] * n, devices=devices, chunks=M, schedule=schedule, loss_fn=loss_fn, checkpoint="never")
    model._mechanisms = replace(model._mechanisms, streams=ClockedStreams(), recorder=listener)
    return lambda: model.step(torch.randn(M, 4), torch.randn(M, 4))


def of_pipelined(n: int, devices: list[str], schedule: str, listener: Listener) -> Callable[[], Any]:
    layers = nn.Sequential(*[block() for _ in range(n)])
    options: Any = {"chunks": M, "schedule": schedule, "loss_fn": loss_fn}
    model: Any = torchgpipe.pipelined(layers, torch.randn(M, 4), balance=[1] * n, devices=devices, **options)
    pipeline = runs_of(model)
    assert pipeline is not None
    pipeline.streams, pipeline.recorder = ClockedStreams(), listener
    return lambda: model.step(torch.randn(M, 4), target=torch.randn(M, 4))


@pytest.mark.parametrize("make", [of_gpipe, of_pipelined])
@pytest.mark.parametrize(
    "schedule, places",
    [("1F1B", [0, 1, 2]), ("Interleaved1F1B", [0, 1, 0, 1]), ("ZeroBubble", [0, 1, 2]), ("V-Half", [0, 1, 1, 0])],
)
def test_a_copy_forward_does_not_wait_for_gradients_on_their_way_back(
    make: Any, schedule: str, places: list[int]
) -> None:
    listener, n = Listener(), len(places)
    step = make(n, [f"late:{place}" for place in places], schedule, listener)
    late.hazards()
    step()
    torch.accelerator.synchronize()
    assert late.hazards() == []
    copies = [work for work in listener.done if work.kind == "copy" and work.other is not None]
    back = [work for work in copies if work.other < work.j]  # type: ignore[operator]
    links = [(a, a + 1) for a in range(n - 1) if places[a] != places[a + 1]]
    for a, c in links:
        forward = [work for work in copies if (work.j, work.other) == (a, c)]
        assert len(forward) == M == len([work for work in back if (work.j, work.other) == (c, a)])
        assert any(there.overlaps(other) for there in forward for other in back if (other.j, other.other) == (c, a))
    for copied in (work for work in copies if work not in back):
        # It may wait for what its device has computed, and for the copies forward before it, and these for the same.
        computed = [work for work in listener.done if work.kind == "forward" and work.precedes(copied)]
        late_ones = [grad for grad in back if grad.precedes(copied) and not any(map(grad.precedes, computed))]
        assert not late_ones, (schedule, copied.i, copied.j, [(grad.i, grad.j) for grad in late_ones])
