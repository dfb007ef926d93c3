"""Draw a simulated program: as text for a terminal, and as SVG for a page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from torchgpipe.schedule.action import Action
from torchgpipe.schedule.simulation import Simulation

__all__ = ["COLOURS", "INK", "TEXT", "draw_svg", "draw_text"]

#: The colours of timelines, which stay apart in grey and for colour-blind readers, and of the letters on them.
COLOURS = {"F": "#56b4e9", "B": "#009e73", "I": "#00604a", "W": "#9bdcc4"}
INK = {"F": "#000", "B": "#fff", "I": "#fff", "W": "#000"}
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
    shortest = min([end - start for _, start, end in _boxes(simulation)], default=1.0)
    width = max(len(_name(action)) for own in simulation.starts for action, _ in own) + 1
    scale = min(width / shortest, (columns - margin) / simulation.seconds)
    lines = []
    for device in range(len(simulation.starts)):
        line = ""
        for action, start, end in _boxes(simulation, device):
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
    margin, height, gap = 70, 24, 4
    scale = (width - margin) / simulation.seconds
    parts = []
    for device in range(len(simulation.starts)):
        y = device * (height + gap)
        parts.append(f'<text x="0" y="{y + 16}" style="fill:{TEXT}">device {device}</text>')
        for action, start, end in _boxes(simulation, device):
            x, wide = margin + start * scale, (end - start) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.5, wide - 1):.1f}" height="{height}" '
                f'fill="{COLOURS[action.kind]}"><title>{escape(str(action))}</title></rect>'
            )
            if wide > 14:
                place = f'x="{x + wide / 2:.1f}" y="{y + 16}" text-anchor="middle"'
                parts.append(f'<text {place} fill="{INK[action.kind]}">{action.i}</text>')
    total = len(simulation.starts) * (height + gap)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" font-family="sans-serif" '
        f'font-size="12">{"".join(parts)}</svg>'
    )


def _boxes(simulation: Simulation, device: int | None = None) -> Iterator[tuple[Action, float, float]]:
    """Yield the actions of a device, or of all, with their starts and ends."""
    rows = simulation.starts if device is None else [simulation.starts[device]]
    for row in rows:
        for action, start in row:
            yield action, start, start + simulation.cost(action)


def _name(action: Action) -> str:
    letter = action.kind if action.kind == "F" else action.kind.lower()
    return f"{letter}{action.i}"
