"""Sum up a timeline in figures: how busy the devices are, and which partition is the slowest.

Everything is arithmetic on spans. In the formulas, m is the number of micro-batches, n is the number of distinct
devices, and c(j) is the average time in seconds that partition j computes for a micro-batch, forward and backward
together. What another balance, schedule or number of micro-batches would give, `torchgpipe.plan` measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torchgpipe.devices.memory import shown_size
from torchgpipe.timeline.span import TRANSFERS, Row, Span, covered, milliseconds, percent

__all__ = ["DeviceUse", "Report"]


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


class Report:
    """The figures of some recorded steps; print the report, or read its attributes.

    Args:
        spans: the spans of all steps
        rows: the partitions
        micro_batches: the number of micro-batches of each step
        peak_memory: the peak memory of each device in bytes, or None if unknown

    Attributes:
        duration (float): seconds from the first start to the last end in a step, added up over the steps. Time in
            which steps overlap counts once; time between steps does not count.
        devices (list[DeviceUse]): the use of each device in this time
        bubble (float): the share of the devices' time in which they do not compute, 1 - sum of busy shares / n
        ideal_bubble (float): the bubble under 'GPipe' and '1F1B' if all devices took the same time and nothing else
            took any, (n - 1) / (m + n - 1), averaged over the steps; see the GPipe paper
            (https://arxiv.org/abs/1811.06965, section 2.3)
        costs (list[float]): c(j) of each partition in seconds: time of all its cells / (steps * micro-batches)
        slowest (int): the partition with the largest c(j)
        slowest_by (float): how far the slowest partition is above the average: its c(j) / the average c(j) - 1
        recomputation (float): the share of recomputations in the time of all cells
        failed (Span | None): the first span that failed, if any; the figures then end with the failure

    Raises:
        ValueError: there is no cell in ``spans``.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        rows: Sequence[Row],
        micro_batches: Mapping[int, int],
        peak_memory: Mapping[torch.device, int | None],
    ) -> None:
        cells = [span for span in spans if span.computes]
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
        self.costs = self._costs(cells)
        self.slowest = max(range(len(rows)), key=self.costs.__getitem__)
        self.slowest_by = _share(self.costs[self.slowest], _average(self.costs)) - 1
        recomputations = [span for span in cells if span.kind == "recomputation"]
        self.recomputation = _share(_total(recomputations), _total(cells))
        self.failed = next((span for span in spans if span.failed), None)

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
    yield f"bubble           {percent(report.bubble):>6}   ideal {percent(report.ideal_bubble)}"
    names = rows[report.slowest].layers
    layers = f"layers '{names[0]}'..'{names[-1]}'" if names else "no layers"
    yield (
        f"slowest          partition {report.slowest} ({layers}), {milliseconds(report.costs[report.slowest])} a "
        f"micro-batch, {percent(report.slowest_by)} above the average"
    )
    yield f"recomputation    {percent(report.recomputation):>6}   of the computing time"


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
