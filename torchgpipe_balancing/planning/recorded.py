"""Record steps of a model in several pipelines, round by round, and take the middle of the times.

The speed of a machine changes within seconds. So all pipelines take turns: what slows one of them down for a while
slows down the others as well.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from torchgpipe.timeline.recorder import record
from torchgpipe.timeline.timeline import Timeline
from torchgpipe_balancing.planning.subject import Subject, Way

__all__ = ["Recorded", "record_steps", "synchronize", "timed"]

Key = TypeVar("Key", bound=Hashable)

_KINDS = {"forward": "F", "backward": "B", "backward of the input": "I", "backward of the weights": "W"}

#: The fewest rounds, and the steps of a pipeline in each; another step runs before them.
_ROUNDS, _STEPS = 2, 2


@dataclass
class Recorded:
    """What the steps of a pipeline have shown.

    Attributes:
        cells: for each kind of action and partition, its seconds, without the first backward of a step
        firsts: for each partition, the seconds of the first backward of a step
        steps: the seconds of each step
        windows: for each step, the seconds from the start of its first cell to the end of its last
    """

    cells: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    firsts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: list[float] = field(default_factory=list)
    windows: list[float] = field(default_factory=list)

    def mean(self, kind: str, j: int) -> float:
        """Return the middle of the seconds of an action in partition ``j``."""
        return _middle(self.cells[kind, j])

    def first(self, j: int) -> float:
        """Return how much longer the first backward of a step takes in partition ``j``."""
        return max(0.0, _middle(self.firsts[j]) - max(self.mean("B", j), self.mean("W", j)))

    @property
    def step(self) -> float:
        """The middle of the seconds of a step."""
        return statistics.median(self.steps)

    @property
    def window(self) -> float:
        """The middle of the seconds of the cells of a step."""
        return statistics.median(self.windows)

    def add(self, timeline: Timeline) -> None:
        """Add the cells of recorded steps."""
        spans = [span for span in timeline.spans if span.computes]
        began = set()
        for span in spans:  # In the order of time.
            kind, j = _KINDS[span.kind], span.partition
            if kind in "BW" and (span.step, j) not in began:
                began.add((span.step, j))
                self.firsts[j].append(span.seconds)
            else:
                self.cells[kind, j].append(span.seconds)
        for step in timeline.steps:
            own = [span for span in spans if span.step == step]
            self.windows.append(max([span.end for span in own]) - min([span.start for span in own]))


def record_steps(
    subject: Subject,
    ways: Mapping[Key, Way],
    rows: Callable[[Key], int],
    devices: Sequence[torch.device],
    seconds: float,
) -> dict[Key, Recorded]:
    """Record steps of all pipelines in turns.

    Args:
        subject: the model
        ways: the pipelines, by name
        rows: returns the rows of a micro-batch
        devices: the devices
        seconds: when to begin no further round
    """
    found: dict[Key, Recorded] = {name: Recorded() for name in ways}
    end = time.perf_counter() + seconds
    done = 0
    while done < _ROUNDS or time.perf_counter() < end:
        for name, way in ways.items():
            model, step = subject.pipeline(way)
            run = partial(step, rows(name) * way.chunks)
            timed(model, run, devices, 1)
            with record(model, steps=_STEPS) as timeline:
                found[name].steps += timed(model, run, devices, _STEPS)
            found[name].add(timeline)
        done += 1
    return found


def timed(model: nn.Module, run: Callable[[], Any], devices: Sequence[torch.device], steps: int) -> list[float]:
    """Return the seconds of each of so many steps.

    Args:
        model: the pipeline, which keeps no gradients
        run: runs a step
        devices: the devices
        steps: the number of steps
    """
    found = []
    for _ in range(steps):
        synchronize(devices)
        begin = time.perf_counter()
        run()
        synchronize(devices)
        found.append(time.perf_counter() - begin)
        model.zero_grad()
    return found


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait for all work of the accelerators among the devices."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half: a mean that a single delay does not change."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut]) if ordered else 0.0
