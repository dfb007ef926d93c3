"""Sum up a timeline in figures: how busy the devices are, what slows them down, and what to try.

Everything is arithmetic on spans. In the formulas, m is the number of micro-batches, n is the number of distinct
devices, and c(j) is the average time in seconds that partition j computes for a micro-batch, forward and backward
together.

Predicted times are simulated, with the mean times of the recorded cells, and without copies. A step is simulated under
the program that it ran, or under that of 'GPipe' if autograd ordered its backward. For n equal devices the idle share
of the latter is (n - 1) / (m + n - 1), the bubble of the GPipe paper (https://arxiv.org/abs/1811.06965, section 2.3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from torchgpipe.devices.memory import shown_size
from torchgpipe.schedule import Program, places_of, program, simulate
from torchgpipe.timeline.prediction import Costs, Prediction, mean_costs, predict, schedule_of, table
from torchgpipe.timeline.span import TRANSFERS, Row, Span, covered, milliseconds, percent

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
        transferring: under ``offload``, the share in which something comes from host memory or goes there
        hidden: the share of this time in which the device computes as well
    """

    device: torch.device
    busy: float
    copying: float
    idle: float
    peak_memory: int | None
    transferring: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class Advice:
    """A change to try.

    Attributes:
        what: the change, in words
        gain: the share of a step's time that the change is expected to save: 1 - time with it / time without, simulated
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
        ideal_bubble (float): the bubble under 'GPipe' if all devices took the same time and nothing else took any,
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
        self._places = places_of([row.device for row in rows])
        #: For each step, the schedule; None for a program of the user's own.
        self._schedules = [
            "GPipe" if ran_program is None else schedule_of(ran_program, m, self._places)
            for ran_program, m in zip(ran, self._chunks)
        ]
        self._programs = [
            program("GPipe", m, self._places) if ran_program is None else ran_program
            for ran_program, m in zip(ran, self._chunks)
        ]
        self.take_turns = None in ran and sum(device.type == "cpu" for device in distinct) > 1
        self._means = mean_costs(cells, sum(self._chunks))
        self.costs = self._costs(cells)
        self.slowest = max(range(len(rows)), key=self.costs.__getitem__)
        self.slowest_by = _share(self.costs[self.slowest], _average(self.costs)) - 1
        recomputations = [span for span in cells if span.kind == "recomputation"]
        self.recomputation = _share(_total(recomputations), _total(cells))
        self.failed = next((span for span in spans if span.failed), None)
        self.schedules: list[Prediction] = []
        if not self.take_turns and self.failed is None:
            self.schedules = predict(cells, rows, micro_batches, ran[0] if ran.count(ran[0]) == len(ran) else None)

    def _use_of(self, device: torch.device, peak_memory: int | None) -> DeviceUse:
        mine = [span for span in self._spans if span.device == device]
        cells = [span for span in mine if span.computes]
        copies = [span for span in mine if span.kind == "copy"]
        transfers = [span for span in mine if span.kind in TRANSFERS]
        beside = covered(cells) + covered(transfers) - covered(cells + transfers)
        return DeviceUse(
            device,
            busy=_share(covered(cells), self.duration),
            copying=_share(covered(copies), self.duration),
            idle=1 - _share(covered(cells + copies), self.duration),
            peak_memory=peak_memory,
            transferring=_share(covered(transfers), self.duration),
            hidden=_share(beside, covered(transfers)),
        )

    def _costs(self, cells: Iterable[Span]) -> list[float]:
        totals = [0.0] * len(self._rows)
        for span in cells:
            totals[span.partition] += span.seconds
        return [total / sum(self._chunks) for total in totals]

    def _seconds(self, programs: Sequence[Program], costs: Costs) -> float:
        """Return the average time of programs, in seconds."""
        # Where no backward ran, forward has not waited for it.
        kinds = "FBIW" if any(kind != "F" for kind, _ in costs) else "F"
        counts = Counter(
            [
                tuple([tuple([action for action in row if action.kind in kinds]) for row in program])
                for program in programs
            ]
        )
        times = [
            count * simulate(program, lambda action: costs.get((action.kind, action.j), 0.0)).seconds
            for program, count in counts.items()
        ]
        return sum(times) / len(programs)

    @property
    def predicted(self) -> float:
        """The average simulated time of a step, in seconds. A real step also takes time for copies, the host, and the
        loss between forward and backward."""
        return self._seconds(self._programs, self._means)

    @property
    def more_chunks(self) -> Advice:
        """Twice as many micro-batches of half the size, under the same schedule, or 'GPipe' for a program of your own.

        This is the best case: a micro-batch of half the size often takes more than half the time.
        """
        m = _average(self._chunks)
        pairs = list(zip(self._schedules, self._programs, self._chunks))
        ran = [program("GPipe", m, self._places) if name is None else ran_program for name, ran_program, m in pairs]
        twice = [program(name or "GPipe", 2 * m, self._places) for name, _, m in pairs]
        halves = {key: cost / 2 for key, cost in self._means.items()}
        what = f"more micro-batches: chunks={round(2 * m)} in place of {round(m)}"
        return _advice(what, self._seconds(twice, halves), self._seconds(ran, self._means))

    @property
    def better_balance(self) -> Advice:
        """An equal load for all devices, divided evenly among the partitions of each.

        This is the best case: layers cannot be split.
        """
        totals = dict.fromkeys([kind for kind, _ in self._means], 0.0)
        for (kind, _), cost in self._means.items():
            totals[kind] += cost
        parts = [len(self.devices) * self._places.count(place) for place in self._places]
        equal = {(kind, j): total / part for kind, total in totals.items() for j, part in enumerate(parts)}
        what = f"another balance, with less in partition {self.slowest}"
        return _advice(what, self._seconds(self._programs, equal), self.predicted)

    @property
    def no_recomputation(self) -> Advice:
        """No recomputation, which takes more memory."""
        once = mean_costs([span for span in self._cells if span.kind != "recomputation"], sum(self._chunks))
        return _advice(
            "checkpoint='never', if the memory suffices", self._seconds(self._programs, once), self.predicted
        )

    @property
    def advice(self) -> list[Advice]:
        """The changes that gain at least a hundredth, largest gain first. If CPU devices take turns, changes that let
        devices work side by side are left out."""
        side_by_side = [] if self.take_turns else [self.more_chunks, self.better_balance]
        possible = [*side_by_side, self.no_recomputation]
        return sorted([advice for advice in possible if advice.gain >= 0.01], key=lambda advice: -advice.gain)

    def __str__(self) -> str:
        return "\n".join(_lines(self, self._rows, len(self._chunks)))


def _lines(report: Report, rows: Sequence[Row], steps: int) -> Iterable[str]:
    yield f"{steps} {'step' if steps == 1 else 'steps'}, {milliseconds(report.duration)} recorded"
    if report.failed is not None:
        span = report.failed
        yield f"failed in {span.kind} of micro-batch {span.micro_batch} on partition {span.partition}"
    yield ""
    yield _columns(["device", "busy", "copying", "idle", "peak memory"])
    for use in report.devices:
        peak = "n/a" if use.peak_memory is None else shown_size(use.peak_memory)
        yield _columns([str(use.device), *map(percent, (use.busy, use.copying, use.idle)), peak])
    for use in report.devices:
        if use.transferring:
            yield (
                f"{use.device!s:<12}from and to host memory {percent(use.transferring)} of the time, "
                f"{percent(use.hidden)} of that while the device computes"
            )
    yield ""
    prediction = next((prediction for prediction in report.schedules if prediction.ran), None)
    ideal = (
        f"ideal {percent(report.ideal_bubble)}"
        if prediction is None
        else f"of the program {percent(prediction.bubble)}, simulated"
    )
    yield f"bubble           {percent(report.bubble):>6}   {ideal}"
    if report.take_turns:
        yield "                 CPU devices take turns: this is no bubble of a pipeline"
    unexplained = 1 - _share(report.predicted * steps, report.duration)
    if unexplained >= 0.1 and not report.take_turns and report.failed is None:
        yield f"beside cells     {percent(unexplained):>6}   of a step: the host, copies, or other work of the machine"
    names = rows[report.slowest].layers
    layers = f"layers '{names[0]}'..'{names[-1]}'" if names else "no layers"
    yield (
        f"slowest          partition {report.slowest} ({layers}), {milliseconds(report.costs[report.slowest])} a "
        f"micro-batch, {percent(report.slowest_by)} above the average"
    )
    yield f"recomputation    {percent(report.recomputation):>6}   of the computing time"
    if report.schedules:
        yield ""
        yield from table(report.schedules, report._cells, report.duration / steps, report.bubble)
    yield ""
    possible = report.advice
    if possible:
        yield "to try           saves of a step's time, at best"
    else:
        yield "to try           nothing that is known to gain a hundredth of a step's time"
    for advice in possible:
        yield f"{percent(advice.gain):>16}   {advice.what}"


def _advice(what: str, seconds: float, before: float) -> Advice:
    return Advice(what, 1 - _share(seconds, before) if before else 0.0)


def _columns(cells: Sequence[str]) -> str:
    first, *others = cells
    return f"{first:<12}" + "".join(f"{cell:>14}" for cell in others)


def _window(spans: Sequence[Span]) -> Span:
    """Return a span from the first start to the last end."""
    return replace(spans[0], start=min(span.start for span in spans), end=max(span.end for span in spans))


def _total(spans: Iterable[Span]) -> float:
    return sum(span.seconds for span in spans)


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
