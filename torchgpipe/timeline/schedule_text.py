"""Write one step as text for a terminal: a line for each partition, with its cells placed by their times.

If a line is too short for the names of the cells, the time continues in further bands of lines below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from torchgpipe.engine.record import Kind
from torchgpipe.timeline.span import Row, Span, milliseconds

__all__ = ["schedule"]

_WIDTH = 100
_MOST_BANDS = 6
_IDLE = "."
_HALVES: dict[Kind, str] = {"backward of the input": "I", "backward of the weights": "W"}


def schedule(spans: Sequence[Span], rows: Sequence[Row]) -> str:
    """Return the cells of one step as text of at most 100 columns."""
    return "\n".join(_lines([span for span in spans if span.computes], rows))


def _lines(cells: Sequence[Span], rows: Sequence[Row]) -> Iterator[str]:
    if not cells:
        yield "no cell of the step has run"
        return
    begin = min(span.start for span in cells)
    seconds = max(span.end for span in cells) - begin
    names = [f"{row.partition} {row.device} " for row in rows]
    margin = max(map(len, names))
    columns = _WIDTH - margin
    bands = _bands(cells, seconds, columns)
    scale = bands * columns / seconds if seconds else 0.0

    halves = " (I of the input, W of the weights)" if any(_name(span)[0] in "IW" for span in cells) else ""
    kinds = "F forward, R recomputation, B backward"
    yield f"step {cells[0].step}, {milliseconds(seconds)}: {kinds}{halves}; . nothing computed"
    for span in cells:
        if span.failed:
            yield f"! failed: {span.kind} of micro-batch {span.micro_batch} on partition {span.partition}"
    strips = [
        _strip([span for span in cells if span.partition == row.partition], begin, scale, bands * columns)
        for row in rows
    ]
    for band in range(bands):
        if bands > 1:
            yield f"{'':{margin}}{milliseconds(band * seconds / bands)}"
        for name, strip in zip(names, strips):
            yield f"{name:{margin}}{strip[band * columns : (band + 1) * columns]}"


def _bands(cells: Sequence[Span], seconds: float, columns: int) -> int:
    """Return the number of bands that gives three quarters of the cells room for their names."""
    durations = sorted(span.seconds for span in cells)
    short = durations[len(durations) // 4]
    wanted = (max(len(_name(span)) for span in cells) + 1) * seconds / short if short else 1.0
    return min(_MOST_BANDS, max(1, ceil(wanted / columns)))


def _strip(cells: Sequence[Span], begin: float, scale: float, columns: int) -> str:
    strip = ""
    for span in sorted(cells, key=lambda span: span.start):
        first = max(len(strip), round((span.start - begin) * scale))
        width = max(1, round((span.end - begin) * scale) - first)
        strip = strip.ljust(first, _IDLE) + _box(_name(span), width)
    return strip.ljust(columns, _IDLE)[:columns]


def _name(span: Span) -> str:
    letter = _HALVES.get(span.kind, span.kind[0].upper())
    return f"{letter}{span.micro_batch}{'!' if span.failed else ''}"


def _box(name: str, width: int) -> str:
    """Fill a name up to a width. A name that is too long becomes its first letter, repeated, with "!" if it failed."""
    if width < len(name):
        return (name[0] * width)[:-1] + "!" if name.endswith("!") else name[0] * width
    return name if width == len(name) else name.ljust(width - 1, "-") + " "
