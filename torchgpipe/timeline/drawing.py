"""Draw one step, after the figure in the GPipe paper: partitions from top to bottom, time from left to right.

This needs Matplotlib, and leaves its global state alone. The colours are Okabe and Ito's, which colour-blind people can
tell apart; the kinds also differ in brightness. The halves of a backward have a darker and a lighter shade of its
colour. A long step continues in further bands below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from os import PathLike
from typing import IO, TYPE_CHECKING, Any

from torchgpipe.engine.record import Kind
from torchgpipe.schedule.drawing import COLOURS, INK
from torchgpipe.timeline.span import KINDS, TRANSFERS, Row, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FAILED", "KIND_COLOURS", "KIND_INK", "draw", "save"]

KIND_COLOURS: dict[Kind, str] = {
    "forward": COLOURS["F"],
    "recomputation": "#F5D76E",
    "backward": COLOURS["B"],
    "backward of the input": COLOURS["I"],
    "backward of the weights": COLOURS["W"],
    "copy": "#CC79A7",
    "wait": "#C8C8C8",
    "upload": "#8C6BB1",
    "download": "#66A61E",
}
KIND_INK: dict[Kind, str] = {
    "forward": INK["F"],
    "recomputation": "#000",
    "backward": INK["B"],
    "backward of the input": INK["I"],
    "backward of the weights": INK["W"],
}
#: Below the cells: the top of a box, and its height.
_STRIPS: dict[Kind, tuple[float, float]] = {"copy": (0.23, 0.2), "upload": (0.21, 0.11), "download": (0.33, 0.11)}
FAILED = "#D00000"
_MOST_BANDS = 4
_POINTS = 72  # an inch
_SMALLEST = 3.5  # size of a number, in points


def draw(spans: Sequence[Span], rows: Sequence[Row]) -> Figure:
    """Draw the spans of one step.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a timeline needs Matplotlib: pip install matplotlib") from error

    begin = min((span.start for span in spans), default=0.0)
    seconds = max((span.end for span in spans), default=0.0) - begin
    wanted = _wanted_points(spans, seconds)
    width = 11.0 if wanted < 9.5 * _POINTS else 16.5
    room = (width - 1.5) * _POINTS
    bands = min(_MOST_BANDS, max(1, ceil(wanted / room)))
    height = 0.5 if len(rows) <= 4 else 0.36
    band_height = height * len(rows) + 0.4

    figure = Figure(figsize=(width, band_height * bands + 0.75))
    total = figure.get_figheight()
    has_copies = any(span.kind in ("copy", *TRANSFERS) for span in spans)
    size = room * bands / seconds / 1000 if seconds else 0.0  # points a millisecond
    for band in range(bands):
        bottom = (0.5 + band_height * (bands - 1 - band)) / total
        axes = figure.add_axes((1.1 / width, bottom, 1 - 1.5 / width, (band_height - 0.4) / total))
        first, last = (1000 * seconds * k / bands for k in (band, band + 1))
        _draw_rows(axes, rows, (first, last if last > first else first + 1e-3))
        for span in spans:
            start, end = ((time - begin) * 1000 for time in (span.start, span.end))
            if end >= first and start <= last:
                _draw_span(axes, span, start, end, (first, last), size, has_copies)
                _write_number(axes, span, max(start, first), min(end, last), size, has_copies)
        if band == bands - 1:
            axes.set_xlabel("ms since the step began", fontsize=9)
    step = spans[0].step if spans else 0
    head = 1 - 0.24 / total
    figure.text(1.1 / width, head, f"Step {step}: {seconds * 1000:.1f} ms", fontsize=11, va="center", weight="bold")
    entries = list(_legend(spans))
    figure.legend(
        handles=entries,
        loc="center right",
        bbox_to_anchor=(1 - 0.4 / width, head),
        bbox_transform=figure.transFigure,
        ncols=len(entries),
        frameon=False,
        fontsize=9 if len(entries) <= 6 else 8,  # room for the title
        handlelength=1.2,
        handleheight=0.9,
        columnspacing=1.2,
        borderaxespad=0,
        borderpad=0,
    )
    return figure


def save(figure: Figure, path: str | PathLike[str] | IO[str]) -> None:
    """Write the picture to a path, in the format of its ending, or to a file object, as SVG."""
    if hasattr(path, "write"):
        figure.savefig(path, format="svg", metadata={"Date": None})
    else:
        figure.savefig(path, dpi=150)


def _wanted_points(spans: Sequence[Span], seconds: float) -> float:
    """Return the width in points at which three quarters of the cells show their numbers."""
    durations = sorted(span.seconds for span in spans if span.computes)
    short = durations[len(durations) // 4] if durations else 0.0
    return _points(str(max(span.micro_batch for span in spans)), 4.0) * seconds / short if short else 0.0


def _points(text: str, size: float) -> float:
    """Return about how many points a number of that font size takes."""
    return size * (0.64 * len(text) + 0.4)


def _draw_rows(axes: Axes, rows: Sequence[Row], time: tuple[float, float]) -> None:
    distinct = len({row.device for row in rows}) == len(rows)
    axes.set_xlim(*time)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # partition 0 is on top
    names = [str(row.device) if distinct else f"{row.partition} on {row.device}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.tick_params(axis="x", labelsize=8, color="#888888")
    axes.set_facecolor("#F4F4F4")
    axes.grid(axis="x", color="white", linewidth=1)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#888888")
    for j in range(1, len(rows)):
        axes.axhline(j - 0.5, color="white", linewidth=2, zorder=0.6)


def _draw_span(
    axes: Axes,
    span: Span,
    start: float,
    end: float,
    time: tuple[float, float],
    size: float,
    has_copies: bool,
) -> None:
    from matplotlib.patches import Rectangle

    top, height = -0.43, (0.62 if has_copies else 0.86)
    if span.kind in _STRIPS:
        top, height = _STRIPS[span.kind]
    points = (end - start) * size
    frame: dict[str, Any] = {"edgecolor": "white", "linewidth": min(0.6, points / 8)}
    if span.failed:
        frame = {"edgecolor": FAILED, "linewidth": 2, "zorder": 3}
    corner = (start, span.partition + top)
    axes.add_patch(Rectangle(corner, end - start, height, facecolor=KIND_COLOURS[span.kind], **frame))
    if span.failed and start >= time[0]:
        where = (start + end) / 2, span.partition + top
        axes.plot(*where, marker="v", color=FAILED, markersize=7, clip_on=False, zorder=4)


def _write_number(axes: Axes, span: Span, start: float, end: float, size: float, has_copies: bool) -> None:
    """Write the micro-batch into the box, if there is room for it."""
    number = str(span.micro_batch)
    font_size = min(9.0, (end - start) * size / _points(number, 1.0))
    if span.kind in KIND_INK and font_size >= _SMALLEST:
        at = ((start + end) / 2, span.partition + (-0.12 if has_copies else 0.0))
        colour = KIND_INK[span.kind]
        axes.annotate(number, at, ha="center", va="center_baseline", fontsize=font_size, color=colour, zorder=3.5)


def _legend(spans: Sequence[Span]) -> Iterator[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for kind in KINDS:
        if any(span.kind == kind for span in spans):
            yield Patch(facecolor=KIND_COLOURS[kind], label=kind.replace(" of the", ":"))
    if any(span.failed for span in spans):
        yield Line2D([], [], marker="v", color=FAILED, linestyle="", markersize=7, label="failed")
