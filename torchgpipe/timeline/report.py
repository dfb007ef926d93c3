"""Sum up a timeline in figures: how busy the devices are, what slows them down, and what to try.

Everything is arithmetic on spans. In the formulas, m is the number of micro-batches, n is the number of distinct
devices, and c(j) is the average time in seconds that partition j computes for a micro-batch, forward and backward
together. The predicted time of a step is the makespan of a pipeline:

.. code-block:: text

    makespan = sum of c(j) over all partitions + (m - 1) * the largest load of a device

where the load of a device is the sum of c(j) over its partitions. The first micro-batch passes all partitions; after
that, a micro-batch comes out each time the busiest device has finished one. For n equal devices the idle share of the
makespan is (n - 1) / (m + n - 1), the bubble of the GPipe paper (https://arxiv.org/abs/1811.06965, section 2.3).

This is the makespan of a mini-batch that runs forward and then backward, and of a step under 'GPipe' and '1F1B'. The
predictions for schedules are simulated instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from torchgpipe.schedule import Program
from torchgpipe.timeline.prediction import Prediction, predict, table
from torchgpipe.timeline.span import Row, Span, covered

__all__ = ["Advice", "DeviceUse", "Report"]


@dataclass(frozen=True)
class DeviceUse:
    """The shares of the time in which a device computes, copies or does neither.

    Attributes:
        device: the device
        busy: the share of the recorded time in which the device computes: covered by cells / duration
        copying: the share in which the device sends: covered by copies / duration; time in which a copy runs beside a
            computation counts for both
        idle: the share in which the device does neither: 1 - covered by cells and copies / duration
        peak_memory: the most bytes that were allocated since PyTorch's statistics of the device were last reset; None
            if unknown, as on the CPU
    """

    device: torch.device
    busy: float
    copying: float
    idle: float
    peak_memory: int | None


@dataclass(frozen=True)
class Advice:
    """A change to try.

    Attributes:
        what: the change, in words
        gain: the share of a step's time that the change is expected to save: 1 - makespan with it / makespan without
    """

    what: str
    gain: float


class Report:
    """The figures of some recorded steps; print the report, or read its attributes.

    Args:
        spans: the spans of all steps
        rows: the partitions
        micro_batches: the number of micro-batches of each step
        peak_memory: the peak memory of each device in bytes, or None if unknown
        programs: the program of each step; None, or missing, if autograd ordered its backward

    Attributes:
        duration (float): seconds from the first start to the last end in a step, added up over the steps. Time in
            which steps overlap counts once; time between steps does not count.
        devices (list[DeviceUse]): the use of each device in this time
        bubble (float): the share of the devices' time in which they do not compute, 1 - sum of busy shares / n
        ideal_bubble (float): the bubble if all cells took the same time and nothing else took any,
            (n - 1) / (m + n - 1), averaged over the steps
        take_turns (bool): whether several of the devices are the CPU, and autograd ordered the backward of a step.
            They share its cores and run one after the other at backward, so ``bubble`` is not that of a pipeline.
        costs (list[float]): c(j) of each partition in seconds: time of all its cells / (steps * micro-batches)
        slowest (int): the partition with the largest c(j)
        slowest_by (float): how far the slowest partition is above the average: its c(j) / the average c(j) - 1
        recomputation (float): the share of recomputations in the time of all cells
        failed (Span | None): the first span that failed, if any; the figures then end with the failure
        schedules (list[Prediction]): what :meth:`GPipe.step <torchgpipe.GPipe.step>` would take under each schedule
            that these devices allow; empty if devices take turns, a span failed, a step had no backward, or steps
            differ in the number of micro-batches

    Raises:
        ValueError: there is no cell in ``spans``.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        rows: Sequence[Row],
        micro_batches: Mapping[int, int],
        peak_memory: Mapping[torch.device, int | None],
        programs: Mapping[int, Program | None] = MappingProxyType({}),
    ) -> None:
        self._cells = cells = [span for span in spans if span.computes]
        if not cells:
            raise ValueError("nothing to report: no cell of the model ran in the block of torchgpipe.record()")
        self._spans = spans
        self._rows = rows
        steps = sorted({span.step for span in cells})
        self._chunks = [micro_batches[step] for step in steps]
        self.duration = covered([_window([span for span in spans if span.step == step]) for step in steps])
        distinct = list(dict.fromkeys(row.device for row in rows))
        self.devices = [self._use_of(device, peak_memory.get(device)) for device in distinct]
        n = len(distinct)
        self.bubble = 1 - sum(use.busy for use in self.devices) / n
        self.ideal_bubble = _average([(n - 1) / (m + n - 1) for m in self._chunks])
        ran = [programs.get(step) for step in steps]
        self.take_turns = None in ran and sum(device.type == "cpu" for device in distinct) > 1
        self.costs = self._costs(cells)
        self.slowest = max(range(len(rows)), key=self.costs.__getitem__)
        self.slowest_by = _share(self.costs[self.slowest], _average(self.costs)) - 1
        again = [span for span in cells if span.kind == "recomputation"]
        self.recomputation = _share(_total(again), _total(cells))
        self.failed = next((span for span in spans if span.failed), None)
        self.schedules: list[Prediction] = []
        if not self.take_turns and self.failed is None:
            self.schedules = predict(cells, rows, micro_batches, ran[0] if ran.count(ran[0]) == len(ran) else None)

    def _use_of(self, device: torch.device, peak_memory: int | None) -> DeviceUse:
        mine = [span for span in self._spans if span.device == device]
        cells = [span for span in mine if span.computes]
        copies = [span for span in mine if span.kind == "copy"]
        return DeviceUse(
            device,
            busy=_share(covered(cells), self.duration),
            copying=_share(covered(copies), self.duration),
            idle=1 - _share(covered(cells + copies), self.duration),
            peak_memory=peak_memory,
        )

    def _costs(self, cells: Iterable[Span]) -> list[float]:
        totals = [0.0] * len(self._rows)
        for span in cells:
            totals[span.partition] += span.seconds
        return [total / sum(self._chunks) for total in totals]

    def _makespan(self, costs: Sequence[float], m: float) -> float:
        return sum(costs) + (m - 1) * max(self._loads(costs))

    def _loads(self, costs: Sequence[float]) -> list[float]:
        loads = dict.fromkeys((row.device for row in self._rows), 0.0)
        for row, cost in zip(self._rows, costs):
            loads[row.device] += cost
        return list(loads.values())

    @property
    def predicted(self) -> float:
        """The average makespan of a step, in seconds. A real step also takes time for copies, the host, and the loss
        between forward and backward."""
        return self._makespan(self.costs, _average(self._chunks))

    @property
    def more_chunks(self) -> Advice:
        """Twice as many micro-batches of half the size: 1 - makespan(c / 2, 2 m) / makespan(c, m).

        This is the best case: a micro-batch of half the size often takes more than half the time.
        """
        m = _average(self._chunks)
        halves = [cost / 2 for cost in self.costs]
        what = f"more micro-batches: chunks={round(2 * m)} in place of {round(m)}"
        return self._advice(what, self._makespan(halves, 2 * m))

    @property
    def better_balance(self) -> Advice:
        """An equal load for all devices: 1 - (sum of c + (m - 1) * sum of c / n) / makespan(c, m).

        This is the best case: layers cannot be split.
        """
        total = sum(self.costs)
        equal = total + (_average(self._chunks) - 1) * total / len(self.devices)
        return self._advice(f"another balance, with less in partition {self.slowest}", equal)

    @property
    def no_recomputation(self) -> Advice:
        """No recomputation, which takes more memory: 1 - makespan(c without recomputation, m) / makespan(c, m)."""
        again = self._costs(span for span in self._spans if span.kind == "recomputation")
        without = [cost - extra for cost, extra in zip(self.costs, again)]
        return self._advice(
            "checkpoint='never', if the memory suffices", self._makespan(without, _average(self._chunks))
        )

    def _advice(self, what: str, seconds: float) -> Advice:
        return Advice(what, 1 - _share(seconds, self.predicted) if self.predicted else 0.0)

    @property
    def advice(self) -> list[Advice]:
        """The changes that gain at least a hundredth, largest gain first. If CPU devices take turns, changes that let
        devices work side by side are left out."""
        side_by_side = [] if self.take_turns else [self.more_chunks, self.better_balance]
        possible = [*side_by_side, self.no_recomputation]
        return sorted([one for one in possible if one.gain >= 0.01], key=lambda one: -one.gain)

    def __str__(self) -> str:
        return "\n".join(_lines(self, self._rows, len(self._chunks)))


def _lines(report: Report, rows: Sequence[Row], steps: int) -> Iterable[str]:
    yield f"{steps} {'step' if steps == 1 else 'steps'}, {_milliseconds(report.duration)} recorded"
    if report.failed is not None:
        span = report.failed
        yield f"failed in {span.kind} of micro-batch {span.micro_batch} on partition {span.partition}"
    yield ""
    yield _columns(["device", "busy", "copying", "idle", "peak memory"])
    for use in report.devices:
        peak = "n/a" if use.peak_memory is None else f"{use.peak_memory / 2**20:.0f} MiB"
        yield _columns([str(use.device), *map(_percent, (use.busy, use.copying, use.idle)), peak])
    yield ""
    own = next((one for one in report.schedules if one.ran), None)
    ideal = (
        f"ideal {_percent(report.ideal_bubble)}" if own is None else f"of the program {_percent(own.bubble)}, simulated"
    )
    yield f"bubble           {_percent(report.bubble):>6}   {ideal}"
    if report.take_turns:
        yield "                 CPU devices take turns: this is no bubble of a pipeline"
    names = rows[report.slowest].layers
    layers = f"layers '{names[0]}'..'{names[-1]}'" if names else "no layers"
    yield (
        f"slowest          partition {report.slowest} ({layers}), {_milliseconds(report.costs[report.slowest])} a "
        f"micro-batch, {_percent(report.slowest_by).strip()} above the average"
    )
    yield f"recomputation    {_percent(report.recomputation):>6}   of the computing time"
    if report.schedules:
        yield ""
        yield from table(report.schedules, report._cells, report.duration / steps, report.bubble)
    yield ""
    if report.advice:
        yield "to try           saves of a step's time, at best"
    else:
        yield "to try           nothing that is known to gain a hundredth of a step's time"
    for advice in report.advice:
        yield f"{_percent(advice.gain):>16}   {advice.what}"


def _columns(cells: Sequence[str]) -> str:
    first, *others = cells
    return f"{first:<12}" + "".join(f"{cell:>14}" for cell in others)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _window(spans: Sequence[Span]) -> Span:
    """Return a span from the first start to the last end."""
    return replace(spans[0], start=min(span.start for span in spans), end=max(span.end for span in spans))


def _total(spans: Iterable[Span]) -> float:
    return sum(span.seconds for span in spans)


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
