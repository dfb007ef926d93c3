"""Draw a planned step as SVG: for each device what it does, and below it the memory that it holds, over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from torchgpipe.schedule.drawing import COLOURS
from torchgpipe.schedule.simulation import changes
from torchgpipe_balancing.planning.alternatives import Alternative, Question
from torchgpipe_balancing.planning.problem import Outcome
from torchgpipe_balancing.planning.text import shown_size

__all__ = ["draw"]

_MARGIN, _BAR, _GRAPH, _GAP = 90.0, 24.0, 44.0, 14.0


def draw(question: Question, one: Alternative, outcome: Outcome, width: int = 900) -> str:
    """Return a picture.

    Args:
        question: what was planned for
        one: the alternative to draw
        outcome: what it costs
        width: the width of the picture in pixels
    """
    simulation = outcome.simulation
    scale = (width - _MARGIN - 10) / (simulation.seconds or 1.0)
    parts = []
    for k, device in enumerate(question.devices):
        y = k * (_BAR + _GRAPH + _GAP)
        parts.append(f'<text x="0" y="{y + 16}">{escape(device.name)}</text>')
        for action, start in simulation.starts[k]:
            x, wide = _MARGIN + start * scale, simulation.cost(action) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.3, wide - 0.7):.1f}" height="{_BAR}" '
                f'fill="{COLOURS[action.kind]}"><title>{escape(str(action))}</title></rect>'
            )
            if wide > 14:
                parts.append(f'<text x="{x + wide / 2:.1f}" y="{y + 16}" text-anchor="middle">{action.i}</text>')
        parts.append(_memory(question, one, outcome, k, y + _BAR + 4, scale))
    height = len(question.devices) * (_BAR + _GRAPH + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _memory(question: Question, one: Alternative, outcome: Outcome, k: int, y: float, scale: float) -> str:
    """Return the graph of the memory of a device, with its limit, and the peak in words."""
    state = sum(partition.state for partition, place in zip(outcome.partitions, one.places) if place == k)
    steps = list(_levels(outcome, k, state))
    limit = question.devices[k].memory
    top = max([level for _, level in steps] + ([] if math.isinf(limit) else [limit])) or 1.0

    def height(level: float) -> float:
        return y + _GRAPH - level / top * _GRAPH

    points = [(_MARGIN, height(0.0))]
    level = state
    for time, after in [(0.0, state), *steps]:
        points += [(_MARGIN + time * scale, height(level)), (_MARGIN + time * scale, height(after))]
        level = after
    end = _MARGIN + outcome.seconds * scale
    points += [(end, height(level)), (end, height(0.0))]
    drawn = " ".join(f"{x:.1f},{at:.1f}" for x, at in points)
    line = (
        ""
        if math.isinf(limit)
        else (
            f'<line x1="{_MARGIN}" x2="{end:.1f}" y1="{height(limit):.1f}" y2="{height(limit):.1f}" stroke="#b2182b" '
            f'stroke-dasharray="4 3"><title>may use {shown_size(limit)}</title></line>'
        )
    )
    return (
        f'<text x="0" y="{y + _GRAPH / 2 + 4}">{shown_size(one.memory[k])}</text>'
        f'<polygon points="{drawn}" fill="#d9d9d9"><title>held</title></polygon>'
        f'<rect x="{_MARGIN}" y="{height(state):.1f}" width="{end - _MARGIN:.1f}" height="{state / top * _GRAPH:.1f}" '
        f'fill="#bdbdbd"><title>parameters, gradients, optimizer: {shown_size(state)}</title></rect>{line}'
    )


def _levels(outcome: Outcome, k: int, state: float) -> Iterator[tuple[float, float]]:
    """Yield the times at which the memory of a device changes, with its level from then on."""
    kept: Sequence[float] = [one.kept for one in outcome.partitions]
    waiting = [one.waiting for one in outcome.partitions]
    level = state
    for action, start in outcome.simulation.starts[k]:
        before, after = changes(action, kept, waiting)
        level += before
        yield start, level
        level += after
        yield start + outcome.simulation.cost(action), level
