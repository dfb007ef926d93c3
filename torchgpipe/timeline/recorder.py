"""Listen to the engine of a pipeline, and turn its work into the spans of a `Timeline` at the end of the recording.

On the CPU, work is done when the call returns, and the host's clock gives its time. On an accelerator, events on the
stream that does the work give its time. The events are read at the end, so that the host does not wait for the device
while it records. One event for each device, recorded at the start when the device is idle, aligns the device's events
with the host's clock.
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
from torchgpipe.front.pipelined import runs_of
from torchgpipe.gpipe import GPipe
from torchgpipe.listener.listener import End, Kind, Place, Recorder
from torchgpipe.model.values import dotted
from torchgpipe.pipeline.pipeline import Pipeline
from torchgpipe.timeline.span import Row, Span
from torchgpipe.timeline.timeline import Timeline

__all__ = ["record"]


@contextmanager
def record(model: nn.Module, *, steps: int = 10) -> Iterator[Timeline]:
    """Record the work of a pipeline in a ``with`` block around any training steps::

        with torchgpipe.record(model) as timeline:
            loss_fn(model(input), target).backward()  # or model.step(input, target=target)
        timeline.plot("step.svg")
        print(timeline.report())

    Every cell (forward, recomputation and backward), every copy between devices and every wait for a copy becomes a
    :class:`~torchgpipe.timeline.span.Span`. The timeline can be read after the block. If an exception leaves the block,
    the timeline ends where the exception was raised.

    Outputs are the same to the last bit as without recording, and so are the gradients of a step, and of micro-batches
    that are checkpointed. Otherwise, with ``checkpoint='never'``, each recorded cell adds its gradients to ``.grad`` by
    itself. So the last bit may differ where ``.grad`` had a value, and more under autocast, and ``create_graph=True``
    is an error. Recording a model of :func:`torchgpipe.pipelined` changes no result.

    A step is a call of the pipeline and those of its backward passes that are inside the block, or a call of its
    :meth:`~torchgpipe.GPipe.step`. Only one block at a time can record a pipeline.

    Of a :func:`~torchgpipe.pipelined` model, neighbouring partitions on one device are one partition of the timeline.
    What is recomputed after its gradient has arrived is a part of backward. Calls in one piece, as in ``generate()``,
    are not recorded.

    Args:
        model: a :class:`~torchgpipe.GPipe`, a :func:`~torchgpipe.pipelined` model, or a module that contains one of
            them, such as a :class:`~torch.nn.parallel.DistributedDataParallel`. Of nested pipelines, the outer one is
            recorded; to record the inner one, pass it.
        steps: the number of steps to keep, counted from the last. Earlier steps take no memory.

    Yields:
        Timeline: the recorded spans, to be read after the block

    Raises:
        TypeError: ``model`` contains no pipeline, or is not a module.
        ValueError: ``model`` contains several pipelines, or ``steps`` is not a positive integer.
        RuntimeError: another block is recording the pipeline.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive integer, the number of steps to keep, but got {steps!r}")
    pipeline = _pipeline_of(model)
    if _recorder_of(pipeline) is not None:
        raise RuntimeError(
            "this pipeline is being recorded already; leave the other block of torchgpipe.record() first"
        )
    recorder = _SpanRecorder(steps)
    timeline = Timeline()
    _set_recorder(pipeline, recorder)
    raised = True
    try:
        yield timeline
        raised = False
    finally:
        _set_recorder(pipeline, None)
        recorder.stop(timeline, raised)


def _recorder_of(pipeline: GPipe | Pipeline) -> Recorder | None:
    return pipeline._mechanisms.recorder if isinstance(pipeline, GPipe) else pipeline.recorder


def _set_recorder(pipeline: GPipe | Pipeline, recorder: Recorder | None) -> None:
    if isinstance(pipeline, GPipe):
        pipeline._mechanisms = replace(pipeline._mechanisms, recorder=recorder)
    else:
        pipeline.recorder = recorder


def _pipeline_of(model: nn.Module) -> GPipe | Pipeline:
    pipelines = dict(_outermost(model, "")) if isinstance(model, nn.Module) else {}
    if not pipelines:
        raise TypeError(
            f"there is no pipeline to record in this {type(model).__name__}; pass a GPipe, a pipelined model, or a "
            "module that contains one of them (a DistributedGPipe is not recorded)"
        )
    if len(pipelines) > 1:
        names = ", ".join(f"'{name}'" for name in pipelines)
        first = next(iter(pipelines))
        raise ValueError(
            f"there are {len(pipelines)} pipelines in this {type(model).__name__} ({names}); record each in a block of "
            f"its own, such as torchgpipe.record(model.get_submodule('{first}'))"
        )
    return next(iter(pipelines.values()))


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, GPipe | Pipeline]]:
    pipeline = module if isinstance(module, GPipe) else runs_of(module)
    if pipeline is not None:
        yield name, pipeline
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, dotted(name, child_name))


class _SpanRecorder:
    """Listen to the steps of a block, and keep the last ones.

    Args:
        steps: the number of steps to keep
    """

    def __init__(self, steps: int) -> None:
        self._began = perf_counter()
        self._numbers = count()
        self._steps: deque[_Step] = deque(maxlen=steps)
        self._clocks: dict[torch.device, _Clock] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not recorded: instead of this recorder it gets None.
        return type(None), ()

    def begin_step(self, m: int, places: Sequence[Place]) -> _Step:
        for place in places:
            if place.stream.device not in self._clocks:
                # Another thread's mini-batch may have begun meanwhile.
                self._clocks.setdefault(place.stream.device, _Clock(place.stream, self._began))
        step = _Step(next(self._numbers), m, places)
        self._steps.append(step)
        return step

    def stop(self, timeline: Timeline, raised: bool) -> None:
        """Read all clocks, and fill the timeline."""
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
    """Listen to one step. `begin` may be called from any thread."""

    def __init__(self, number: int, m: int, places: Sequence[Place]) -> None:
        self.number = number
        self.m = m
        self.rows = [Row(j, place.stream.device, tuple(place.layers)) for j, place in enumerate(places)]
        self._work: list[_Work] = []

    def begin(self, kind: Kind, i: int, j: int, other: int | None, stream: Stream) -> End:
        work = _Work(kind, i, j, other, stream)
        self._work.append(work)
        return work.end_now

    def read(self, clocks: dict[torch.device, _Clock], raised: bool) -> list[Span]:
        """Return the spans of the step. Work that has not ended has failed.

        Args:
            clocks: the clock of each device
            raised: whether an exception has ended the recording in this step, so that open work has failed just now;
                otherwise it ends with the last work of the step
        """
        work = list(self._work)
        if raised:
            for part in work:
                if part.end is None:
                    part.end_now(failed=True)
        last = max([clocks[part.stream.device].at(part.end) for part in work if part.end is not None], default=0.0)
        return [self._span(part, clocks[part.stream.device], last) for part in work]

    def _span(self, work: _Work, clock: _Clock, last: float) -> Span:
        row = self.rows[work.j]
        start = clock.at(work.start)
        end = max(start, last if work.end is None else clock.at(work.end))
        failed = work.failed or work.end is None
        where = row.device, work.stream.name, row.layers
        return Span(self.number, work.kind, work.i, work.j, *where, start, end, work.other, failed)


class _Work:
    """A cell, a copy or a wait on a stream; ``end`` is None until it ends."""

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
    """Convert the ticks of a device to seconds since the recording began."""

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
