"""Measure the layers of a model where they will run: in a pipeline over all devices, with each layer as a partition.

So times have in them what layers measured alone would not: cores and an interpreter that the devices share. Four steps
are recorded for each size of a micro-batch:

    each layer a partition    under '1F1B': F and B of each layer      under 'ZeroBubble': F, I and W
    a partition a device      the same: what a cell takes beside its layers

    cell  =  (sum over the layers, each a partition  -  sum over the devices)  /  (layers - devices)
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from torchgpipe.devices.device import same_memory
from torchgpipe.schedule import ScheduleName, program, simulate
from torchgpipe.timeline.recorder import record
from torchgpipe_balancing.partition import partition
from torchgpipe_balancing.planning.costs import CellCosts, Costs, LayerCosts, Sample
from torchgpipe_balancing.planning.counting import Bytes, counted
from torchgpipe_balancing.planning.subject import Subject, Way

__all__ = ["measured"]

_KINDS = {"forward": "F", "backward": "B", "backward of the input": "I", "backward of the weights": "W"}

#: Steps that run before times are taken, and the fewest steps whose times are taken.
_WARM_UP, _STEPS = 2, 3


def measured(
    subject: Subject, devices: Sequence[torch.device], rows: Sequence[int], slowness: Sequence[float], *, seconds: float
) -> Costs:
    """Measure a model.

    Args:
        subject: the model
        devices: the devices to measure on
        rows: the sizes of micro-batches, in increasing order. The largest are left out if memory runs out
        slowness: the time that each device takes, relative to the one that times are for
        seconds: roughly how long to measure
    """
    layers = [
        (
            sum([tensor.nbytes for tensor in own if isinstance(tensor, torch.nn.Parameter)]),
            sum([tensor.nbytes for tensor in own if tensor.requires_grad]),
            sum([tensor.nbytes for tensor in own if not isinstance(tensor, torch.nn.Parameter)]),
        )
        for own in subject.owned()
    ]
    on_meta = any(tensor.is_meta for own in subject.owned() for tensor in own)
    bench = None if on_meta else _Bench(subject, devices, slowness, [1 + one[0] for one in layers], seconds / len(rows))
    samples: list[list[Sample]] = []
    cells: list[CellCosts] = []
    for count in rows:
        try:
            if bench is None:
                times, cell = [_without_times(state[0]) for state in layers], CellCosts()
                sizes = counted(subject, partial(subject.plain, count))
            else:
                times, cell = bench.times(count)
                sizes = bench.sizes(count)
        except torch.OutOfMemoryError:
            if not cells:
                raise
            break  # What larger sizes take follows from the smaller ones.
        samples.append([Sample(*own, *map(float, size)) for own, size in zip(times, sizes)])
        cells.append(cell)
    latency, per_byte = (0.0, 0.0) if on_meta else _transfers(devices)
    return Costs(
        subject.kind,
        tuple(
            LayerCosts(tuple(names), *state, tuple(own))
            for names, state, own in zip(subject.layers, layers, zip(*samples))
        ),
        tuple(rows[: len(cells)]),
        tuple(cells),
        latency,
        per_byte,
        "meta" if on_meta else ", ".join(map(str, devices)),
        subject.loss,
    )


@dataclass
class _Run:
    """What recorded steps have shown.

    Attributes:
        means: for each kind of action and partition, its mean seconds, without the first backward of a step
        first: for each partition, how much longer the first backward of a step takes
        step: seconds of a step
        window: seconds from the start of its first cell to the end of the last
    """

    means: dict[tuple[str, int], float]
    first: list[float]
    step: float
    window: float


class _Bench:
    """Runs pipelines of a model over all devices. See `measured` for the arguments."""

    def __init__(
        self,
        subject: Subject,
        devices: Sequence[torch.device],
        slowness: Sequence[float],
        loads: Sequence[float],
        seconds: float,
    ) -> None:
        self._subject = subject
        self._devices = devices
        self._counts = partition(loads, len(devices))
        self._of_layers = [device for device, count in zip(devices, self._counts) for _ in range(count)]
        self._slowness = [slow for slow, count in zip(slowness, self._counts) for _ in range(count)]
        self._m = max(4, 2 * len(devices))
        self._seconds = seconds / 4

    def times(self, rows: int) -> tuple[list[list[float]], CellCosts]:
        """Return the times of each layer: F, B, I, W, and the first backward; and those of cells."""
        n, count = len(self._devices), len(self._of_layers)
        fine, coarse = self._run(rows, "1F1B", apart=True), self._run(rows, "1F1B", apart=False)
        seconds = {kind: [fine.means[kind, k] for k in range(count)] for kind in "FB"}
        cell = {kind: _beside(seconds[kind], [coarse.means[kind, j] for j in range(n)]) for kind in "FB"}
        if n == 1:
            halves = {kind: [own / 2 for own in seconds["B"]] for kind in "IW"}
            cell |= dict.fromkeys("IW", cell["B"] / 2)
        else:
            # The first partition has no first half of backward.
            split, joined = (self._run(rows, "ZeroBubble", apart=apart).means for apart in (True, False))
            halves = {kind: [split[kind, k] for k in range(count)] for kind in "IW"}
            behind = self._counts[0]
            cell |= {kind: _beside(halves[kind][behind:], [joined[kind, j] for j in range(1, n)]) for kind in "IW"}
        of_kind = seconds | halves
        times = [
            [*(max(0.0, of_kind[kind][k] - cell[kind]) / slow for kind in "FBIW"), fine.first[k] / slow]
            for k, slow in enumerate(self._slowness)
        ]
        rest, factor = coarse.step - coarse.window, coarse.window / self._simulated(coarse)
        return times, CellCosts(cell["F"], cell["B"], cell["I"], cell["W"], rest, factor)

    def _simulated(self, run: _Run) -> float:
        """Return the simulated seconds of the steps of a run with a partition a device."""
        actions = program("1F1B", self._m, range(len(self._devices)))
        firsts = {next(action for action in own if action.kind == "B") for own in actions}
        return simulate(
            actions,
            lambda action: run.means[action.kind, action.j] + (run.first[action.j] if action in firsts else 0.0),
        ).seconds

    def sizes(self, rows: int) -> list[Bytes]:
        """Return the bytes of each layer."""
        model, step = self._subject.pipeline(self._way("1F1B", 1, apart=True))
        step(rows)
        model.zero_grad()
        found = counted(self._subject, partial(step, rows))
        model.zero_grad()
        return found

    def _way(self, schedule: ScheduleName, m: int, *, apart: bool) -> Way:
        if apart:
            return Way([1] * len(self._of_layers), self._of_layers, m, schedule, apart=True)
        return Way(self._counts, self._devices, m, schedule)

    def _run(self, rows: int, schedule: ScheduleName, *, apart: bool) -> _Run:
        model, step = self._subject.pipeline(self._way(schedule, self._m, apart=apart))
        run = partial(step, rows * self._m)
        for _ in range(_WARM_UP):
            run()
            model.zero_grad()
        seconds: list[float] = []
        end = time.perf_counter() + self._seconds
        with record(model, steps=1000) as timeline:
            while len(seconds) < _STEPS or time.perf_counter() < end:
                seconds.append(self._timed(run))
                model.zero_grad()
        return _summed_up(timeline, seconds)

    def _timed(self, run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        for device in self._devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return time.perf_counter() - begin


def _without_times(parameters: int) -> list[float]:
    """Return what stands for the times of a layer on the meta device: a nanosecond for each byte of its parameters."""
    seconds = parameters * 1e-9
    return [seconds, 2 * seconds, seconds, seconds, 0.0]


def _beside(apart: Sequence[float], together: Sequence[float]) -> float:
    """Return what a cell takes beside its layers, given the times of layers by themselves and of partitions."""
    more = len(apart) - len(together)
    return max(0.0, sum(apart) - sum(together)) / more if more else 0.0


def _summed_up(timeline: Any, seconds: Sequence[float]) -> _Run:
    spans = [span for span in timeline.spans if span.computes]
    n = len(timeline.partitions)
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    firsts: dict[int, list[float]] = defaultdict(list)
    seen = set()
    for span in spans:  # In the order of time.
        kind = _KINDS[span.kind]
        if kind in "BW" and (span.step, span.partition) not in seen:
            seen.add((span.step, span.partition))
            firsts[span.partition].append(span.seconds)
        else:
            found[kind, span.partition].append(span.seconds)
    means = {(kind, j): _middle(found[kind, j]) for kind in "FBIW" for j in range(n)}
    windows = [
        max([span.end for span in own]) - min([span.start for span in own])
        for step in timeline.steps
        for own in [[span for span in spans if span.step == step]]
    ]
    first = [max(0.0, _middle(firsts[j]) - max(means["B", j], means["W", j])) for j in range(n)]
    return _Run(means, first, statistics.median(seconds), statistics.median(windows))


def _middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half: a mean that a single delay does not change."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut]) if ordered else 0.0


def _transfers(devices: Sequence[torch.device]) -> tuple[float, float]:
    """Return the seconds that any transfer takes, and those for each byte besides; none within one memory."""
    pair = next(((a, b) for a, b in pairwise(devices) if not same_memory(a, b)), None)
    if pair is None:
        return 0.0, 0.0
    source, target = pair
    small, large = 1 << 10, 1 << 24

    def seconds(size: int) -> float:
        tensor = torch.empty(size, dtype=torch.uint8, device=source)
        found = []
        for _ in range(10):
            for device in pair:
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
            begin = time.perf_counter()
            tensor.to(target)
            for device in pair:
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
            found.append(time.perf_counter() - begin)
        return statistics.median(found)

    latency = seconds(small)
    return latency, max(0.0, seconds(large) - latency) / (large - small)
