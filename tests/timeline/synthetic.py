"""Synthetic timelines whose figures can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchgpipe.listener.listener import Kind
from torchgpipe.timeline.span import Row, Span

__all__ = ["ideal", "rows", "span"]


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
