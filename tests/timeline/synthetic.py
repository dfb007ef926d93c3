"""Synthetic timelines whose figures can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchgpipe.engine.record import Kind
from torchgpipe.schedule import COSTS, Program, simulate
from torchgpipe.timeline.report import Report
from torchgpipe.timeline.span import Row, Span

__all__ = ["ideal", "ran", "rows", "span"]


def rows(n: int, devices: Sequence[str] | None = None) -> list[Row]:
    """Return partitions with one layer each, by default on distinct devices."""
    names = [f"cuda:{j}" for j in range(n)] if devices is None else devices
    return [Row(j, torch.device(name), (str(j),)) for j, name in enumerate(names)]


def span(
    kind: Kind,
    i: int,
    j: int,
    start: float,
    end: float,
    *,
    step: int = 0,
    device: str | None = None,
    stream: str = "computing",
    other: int | None = None,
    failed: bool = False,
) -> Span:
    """Return a span of partition j, by default on ``cuda:j``."""
    where = torch.device(f"cuda:{j}" if device is None else device)
    return Span(step, kind, i, j, where, stream, (str(j),), start, end, other, failed)


def ideal(m: int, n: int, *, again: float = 1.0, devices: Sequence[str] | None = None, step: int = 0) -> list[Span]:
    """Return a step as in the GPipe paper: forward takes a second, recomputation ``again``, and backward two."""
    names = [str(row.device) for row in rows(n, devices)]
    spans = []
    for j in range(n):
        for i in range(m):
            spans.append(span("forward", i, j, i + j, i + j + 1, step=step, device=names[j]))
            start = m + n - 1 + (m - 1 - i + n - 1 - j) * (again + 2)
            if again:
                spans.append(span("recomputation", i, j, start, start + again, step=step, device=names[j]))
            spans.append(span("backward", i, j, start + again, start + again + 2, step=step, device=names[j]))
    return sorted(spans, key=lambda span: (span.start, span.end))


KINDS: dict[str, Kind] = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
}


def ran(program: Program, devices: Sequence[str], costs: Any = COSTS) -> Report:
    """Return the report of a step that went exactly as simulated, of as many micro-batches as the program has."""
    made = simulate(program, costs)
    spans = [
        span(KINDS[action.kind], action.i, action.j, start, start + made.cost(action), device=devices[action.j])
        for own in made.starts
        for action, start in own
    ]
    m = 1 + max(action.i for own in program for action in own)
    return Report(spans, rows(len(devices), devices), {0: m}, {}, {0: program})
