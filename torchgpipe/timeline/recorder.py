"""Listening to a pipeline: what its engine tells becomes the spans of a `Timeline`, when the recording is over.

The time is the clock's on the CPU, where work is done when the call returns. On an accelerator it is that of
events, on the stream that did the work. They are read at the end, so that nobody waits for the device before, and laid
on the host's clock by one event for each device, recorded at the start when the device had nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import nn

from torchgpipe.devices.device import device_module
from torchgpipe.devices.stream import Stream, Tick
from torchgpipe.engine.record import End, Kind, Place
from torchgpipe.gpipe import GPipe
from torchgpipe.timeline.span import Row, Span
from torchgpipe.timeline.timeline import Timeline

__all__ = ["record"]


@contextmanager
def record(model: nn.Module, *, steps: int = 10) -> Iterator[Timeline]:
    """Records what a pipeline does, and when, in a ``with`` block around any training steps::

        with torchgpipe.record(model) as timeline:
            loss_fn(model(input), target).backward()
        timeline.plot("step.svg")
        print(timeline.report())

    Every cell (forward, recomputation and backward), every copy between devices and every wait for one becomes a
    :class:`~torchgpipe.timeline.span.Span`. The timeline can be read when the block is left, also by an exception: then
    it ends where that was raised. Results are the same to the last bit as without recording.

    A step is a call of the pipeline, with its backward passes as far as they are inside the block. Only one block at
    a time can record a pipeline.

    Args:
        model: a :class:`~torchgpipe.GPipe`, or a module that contains one, such as a
            :class:`~torch.nn.parallel.DistributedDataParallel`. A pipeline in a layer of another one is recorded only
            if it is given itself.
        steps: how many steps are kept, the last ones. The others' memory is freed.

    Yields:
        Timeline: what was recorded, to be read after the block

    Raises:
        TypeError: ``model`` contains no pipeline, or is no module.
        ValueError: ``model`` contains several pipelines, or ``steps`` is not a positive integer.
        RuntimeError: the pipeline is being recorded already.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive integer, the number of steps to keep, but got {steps!r}")
    pipeline = _pipeline_of(model)
    if pipeline._mechanisms.recorder is not None:
        raise RuntimeError(
            "this pipeline is being recorded already; leave the other block of torchgpipe.record() first"
        )
    recorder = _Recorder(steps)
    timeline = Timeline()
    pipeline._mechanisms = replace(pipeline._mechanisms, recorder=recorder)
    raised = True
    try:
        yield timeline
        raised = False
    finally:
        pipeline._mechanisms = replace(pipeline._mechanisms, recorder=None)
        recorder.stop(timeline, raised)


def _pipeline_of(model: nn.Module) -> GPipe:
    found = dict(_outermost(model, "")) if isinstance(model, nn.Module) else {}
    if not found:
        raise TypeError(
            f"there is no GPipe to record in this {type(model).__name__}; pass the pipeline, or a module that contains "
            "it (a DistributedGPipe is not recorded)"
        )
    if len(found) > 1:
        names = ", ".join(f"'{name}'" for name in found)
        first = next(iter(found))
        raise ValueError(
            f"there are {len(found)} pipelines in this {type(model).__name__} ({names}); record each in a block of its "
            f"own, such as torchgpipe.record(model.get_submodule('{first}'))"
        )
    return next(iter(found.values()))


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, GPipe]]:
    if isinstance(module, GPipe):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name)


class _Recorder:
    """Listens to the steps of a block, and keeps the last ones.

    Args:
        steps: how many
    """

    def __init__(self, steps: int) -> None:
        self._began = perf_counter()
        self._numbers = count()
        self._source = object()
        self._steps: deque[_Step] = deque(maxlen=steps)
        self._clocks: dict[torch.device, _Clock] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is another one, which nobody listens to.
        return type(None), ()

    def begin_step(self, m: int, places: Sequence[Place]) -> _Step:
        for place in places:
            if place.stream.device not in self._clocks:
                self._clocks[place.stream.device] = _Clock(place.stream, self._began)
        step = _Step(next(self._numbers), m, places, self._source)
        self._steps.append(step)
        return step

    def stop(self, timeline: Timeline, raised: bool) -> None:
        """Reads all clocks."""
        steps = list(self._steps)
        spans = []
        for step in steps:
            spans += step.read(self._clocks, raised and step is steps[-1])
        timeline._fill(
            rows=steps[-1].rows if steps else [],
            micro_batches={step.number: step.m for step in steps},
            spans=sorted(spans, key=lambda span: (span.step, span.start, span.end)),
            peak_memory={device: _peak_memory(device) for device in self._clocks},
        )


class _Step:
    """Listens to a step. Any thread may append to its list."""

    def __init__(self, number: int, m: int, places: Sequence[Place], source: object) -> None:
        self.source = source
        self.number = number
        self.m = m
        self.rows = [Row(j, place.stream.device, tuple(place.layers)) for j, place in enumerate(places)]
        self._work: list[_Work] = []

    def begin(self, kind: Kind, i: int, j: int, other: int | None, stream: Stream) -> End:
        work = _Work(kind, i, j, other, stream)
        self._work.append(work)
        return work.end_now

    def read(self, clocks: dict[torch.device, _Clock], raised: bool) -> list[Span]:
        """The spans; what is still open has failed: now, if an error ends the recording, and else some time ago."""
        work = list(self._work)
        if raised:
            for one in work:
                if one.end is None:
                    one.end_now(failed=True)
        last = max([clocks[one.stream.device].at(one.end) for one in work if one.end is not None], default=0.0)
        return [self._span(one, clocks[one.stream.device], last) for one in work]

    def _span(self, work: _Work, clock: _Clock, last: float) -> Span:
        row = self.rows[work.j]
        start = clock.at(work.start)
        end = max(start, last if work.end is None else clock.at(work.end))
        failed = work.failed or work.end is None
        where = row.device, work.stream.name, row.layers
        return Span(self.number, work.kind, work.i, work.j, *where, start, end, work.other, failed)


class _Work:
    """Something on a stream: as long as it is not over, ``end`` is None."""

    __slots__ = ("end", "failed", "i", "j", "kind", "other", "start", "stream")

    def __init__(self, kind: Kind, i: int, j: int, other: int | None, stream: Stream) -> None:
        self.kind = kind
        self.i = i
        self.j = j
        self.other = other
        self.stream = stream
        self.end: Tick | None = None
        self.failed = False
        self.start = stream.tick()

    def end_now(self, failed: bool) -> None:
        self.end = self.stream.tick()
        self.failed = failed


class _Clock:
    """Says at which second of the recording a tick of a device was."""

    def __init__(self, stream: Stream, began: float) -> None:
        stream.synchronize()
        self._stream = stream
        self._tick = stream.tick()
        self._second = perf_counter() - began

    def at(self, tick: Tick) -> float:
        return self._second + self._stream.seconds(self._tick, tick)


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cpu" or not hasattr(device_module(device), "max_memory_allocated"):
        return None
    peak: int = device_module(device).max_memory_allocated(device)
    return peak
