"""Draw a planned step as SVG: for each device what it does, and below it the memory that it holds, over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from torchgpipe.devices.memory import shown_size
from torchgpipe.schedule.action import Action
from torchgpipe.schedule.drawing import COLOURS, INK, TEXT
from torchgpipe.schedule.simulation import changes
from torchgpipe_balancing.planning.alternatives import Alternative, Question
from torchgpipe_balancing.planning.problem import Outcome

__all__ = ["draw"]

_TOP, _MARGIN, _BAR, _GRAPH, _GAP = 30.0, 84.0, 24.0, 40.0, 16.0

#: The colours of what is held for backward, of what is there all the time, and of the limit.
_HELD, _STATE, _LIMIT = "#cc79a7", "#909090", "#d55e00"

_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "of weights"}


def draw(question: Question, one: Alternative, outcome: Outcome, width: int = 720) -> str:
    """Return a picture.

    Args:
        question: what was planned for
        one: the alternative to draw
        outcome: what it costs
        width: the width of the picture in pixels
    """
    simulation = outcome.simulation
    scale = (width - _MARGIN - 4) / (simulation.seconds or 1.0)
    parts = [_legend(simulation.starts, any(math.isfinite(device.memory) for device in question.devices))]
    for k, device in enumerate(question.devices):
        y = _TOP + k * (_BAR + _GRAPH + _GAP)
        parts.append(_text(0, y + _BAR / 2, device.name))
        for action, start in simulation.starts[k]:
            x, wide = _MARGIN + start * scale, simulation.cost(action) * scale
            box = f'x="{x:.1f}" y="{y:g}" width="{max(0.3, wide - 0.7):.1f}" height="{_BAR:g}"'
            parts.append(f'<rect {box} fill="{COLOURS[action.kind]}"><title>{action}</title></rect>')
            if wide > 14:
                parts.append(_text(x + wide / 2, y + _BAR / 2, str(action.i), "middle", INK[action.kind]))
        parts.append(_memory(question, one, outcome, k, y + _BAR + 5, scale))
    height = _TOP + len(question.devices) * (_BAR + _GRAPH + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        f"<title>A planned step</title>{''.join(parts)}</svg>\n"
    )


def _legend(starts: Sequence[Sequence[tuple[Action, float]]], has_limits: bool) -> str:
    kinds = {action.kind for own in starts for action, _ in own}
    entries = [(COLOURS[kind], name) for kind, name in _NAMES.items() if kind in kinds]
    entries += [(_HELD, "activations"), (_STATE, "parameters, gradients, optimizer")]
    parts, x = [], _MARGIN
    for colour, name in entries:
        parts.append(f'<rect x="{x:g}" y="4" width="12" height="12" fill="{colour}"/>{_text(x + 17, 10, name)}')
        x += 36 + 6.4 * len(name)
    if has_limits:
        parts.append(_dashed(x, x + 14, 10) + _text(x + 19, 10, "limit"))
    return "".join(parts)


def _memory(question: Question, one: Alternative, outcome: Outcome, k: int, y: float, scale: float) -> str:
    """Return the graph of the memory of a device, with its limit, and the peak in words."""
    state = sum(partition.state for partition, place in zip(outcome.partitions, one.places) if place == k)
    limit = question.devices[k].memory
    levels = [(0.0, state), *_levels(outcome, k, state)]
    top = max([level for _, level in levels] + ([] if math.isinf(limit) else [limit])) or 1.0

    def height(level: float) -> float:
        return y + _GRAPH - level / top * _GRAPH

    points, before = [(_MARGIN, height(0.0))], state
    for time, level in levels:
        points += [(_MARGIN + time * scale, height(before)), (_MARGIN + time * scale, height(level))]
        before = level
    end = _MARGIN + outcome.seconds * scale
    points += [(end, height(before)), (end, height(0.0))]
    drawn = " ".join(f"{x:.1f},{at:.1f}" for x, at in points)
    bottom = (
        f'x="{_MARGIN:g}" y="{height(state):.1f}" width="{end - _MARGIN:.1f}" height="{y + _GRAPH - height(state):.1f}"'
    )
    return (
        _text(0, y + _GRAPH / 2, shown_size(one.memory[k]))
        + f'<polygon points="{drawn}" fill="{_HELD}"/><rect {bottom} fill="{_STATE}"/>'
        + ("" if math.isinf(limit) else _dashed(_MARGIN, end, height(limit)))
    )


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = TEXT) -> str:
    place = f'x="{x:.1f}" y="{y:g}" text-anchor="{anchor}" dominant-baseline="central" font-size="12.5"'
    return f'<text {place} style="fill:{colour}">{escape(text)}</text>'


def _dashed(start: float, end: float, y: float) -> str:
    place = f'x1="{start:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line {place} stroke="{_LIMIT}" stroke-width="1.5" stroke-dasharray="5 3"/>'


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
