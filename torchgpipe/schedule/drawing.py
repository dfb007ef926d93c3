"""Draw a simulated program: as text for a terminal, and as SVG for a page. Recorded steps have the same boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torchgpipe.schedule.action import Action
from torchgpipe.schedule.simulation import Simulation

__all__ = ["COLOURS", "TEXT", "Box", "boxes_of", "draw_boxes", "draw_svg", "draw_text"]

#: The colours of timelines, which stay apart in grey and for colour-blind readers.
COLOURS = {"F": "#56b4e9", "B": "#009e73", "I": "#00604a", "W": "#9bdcc4"}
#: The colour of other letters: that of the page if the picture is a part of its HTML, or a grey.
TEXT = "var(--color-foreground-primary, #808080)"


def draw_text(simulation: Simulation, columns: int = 100) -> str:
    """Return a line for each device, with the micro-batch of each action at its time.

    Upper case marks forward, as in ``F0``; backward is ``b0``, and its halves ``i0`` and ``w0``. A dot is idle time.

    Args:
        simulation: the simulated program
        columns: the largest number of columns; actions that are too narrow for their names show the first letter only
    """
    margin = len(f"device {len(simulation.starts) - 1} ")
    rows = [_spans(simulation, k) for k in range(len(simulation.starts))]
    shortest = min([end - start for row in rows for _, start, end in row], default=1.0)
    width = max(len(_name(action)) for row in rows for action, _, _ in row) + 1
    scale = min(width / shortest, (columns - margin) / simulation.seconds)
    lines = []
    for device, row in enumerate(rows):
        line = ""
        for action, start, end in row:
            line = line.ljust(round(start * scale), ".")
            room = max(1, round(end * scale) - len(line))
            name = _name(action)
            line += (name if len(name) <= room else name[0]).ljust(room)[:room]
        lines.append(f"{f'device {device}':{margin}}{line.ljust(round(simulation.seconds * scale), '.')}")
    return "\n".join(line.rstrip() for line in lines)


def draw_svg(simulation: Simulation, width: int = 900) -> str:
    """Return a picture: a row for each device, a box for each action, coloured by kind.

    Args:
        simulation: the simulated program
        width: the width of the picture in pixels
    """
    rows = [(f"device {device}", boxes_of(simulation, device)) for device in range(len(simulation.starts))]
    return draw_boxes(rows, simulation.seconds, width)


class Box(NamedTuple):
    """A box from ``start`` to ``end``, in seconds.

    Attributes:
        number: what stands in the box, if there is room
        title: what a mouse over the box shows
        colour: the colour of the box, in hexadecimal digits
        top, bottom: where in its row the box begins and ends, as shares of the height
    """

    start: float
    end: float
    number: str
    title: str
    colour: str
    top: float = 0.0
    bottom: float = 1.0


def draw_boxes(
    rows: Sequence[tuple[str, Sequence[Box]]],
    seconds: float,
    width: int,
    title: str = "",
    legend: Mapping[str, str] = MappingProxyType({}),
    height: int = 24,
) -> str:
    """Return an SVG with rows of boxes.

    Args:
        rows: the name of each row, and its boxes
        seconds: the time that the width stands for
        width: the width of the picture in pixels
        title: a line above the picture
        legend: names, each with its colour, for a line above the rows
        height: the height of a row in pixels
    """
    margin, gap = max(70, 8 + 7 * max([len(name) for name, _ in rows], default=0)), 4
    scale = (width - margin) / (seconds or 1.0)
    top, x = 0, 0.5
    parts = []
    if title:
        parts.append(_text(0, 14, title))
        top += 20
    for name, colour in legend.items():
        place = f'x="{x:g}" y="{top + 2}" width="12" height="12"'
        parts.append(f'<rect {place} fill="{colour}"/>{_text(x + 16, top + 12, name)}')
        x += 30 + 6 * len(name)
    top += 24 if legend else 0
    for k, (name, boxes) in enumerate(rows):
        y = top + k * (height + gap)
        parts.append(_text(0, y + height / 2 + 4, name))
        for box in boxes:
            x, wide = margin + box.start * scale, (box.end - box.start) * scale
            gap_between = 1 if box.number else 0
            place = f'x="{x:.1f}" y="{y + box.top * height:g}" width="{max(0.5, wide - gap_between):.1f}"'
            parts.append(
                f'<rect {place} height="{(box.bottom - box.top) * height:g}" '
                f'fill="{box.colour}"><title>{_escaped(box.title)}</title></rect>'
            )
            if wide > max(14, 5 * len(box.number)) and box.number:
                middle = f'x="{x + wide / 2:.1f}" y="{y + (box.top + box.bottom) / 2 * height + 4:g}"'
                parts.append(
                    f'<text {middle} text-anchor="middle" fill="{_ink(box.colour)}">{_escaped(box.number)}</text>'
                )
    size = f'viewBox="0 0 {width} {top + len(rows) * (height + gap)}" width="{width}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'


def _ink(colour: str) -> str:
    """Return black on a bright colour, or else white."""
    red, green, blue = bytes.fromhex(colour[1:])
    return "#000" if 0.3 * red + 0.59 * green + 0.11 * blue > 128 else "#fff"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" style="fill:{TEXT}">{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    from html import escape  # It has all entities of HTML, which whoever draws nothing need not wait for.

    return escape(text)


def boxes_of(simulation: Simulation, device: int) -> list[Box]:
    """Return a box for each action of a device."""
    spans = _spans(simulation, device)
    return [Box(start, end, str(action.i), str(action), COLOURS[action.kind]) for action, start, end in spans]


def _spans(simulation: Simulation, device: int) -> list[tuple[Action, float, float]]:
    """Return the actions of a device, with their starts and ends."""
    return [(action, start, start + simulation.cost(action)) for action, start in simulation.starts[device]]


def _name(action: Action) -> str:
    letter = action.kind if action.kind == "F" else action.kind.lower()
    return f"{letter}{action.i}"
