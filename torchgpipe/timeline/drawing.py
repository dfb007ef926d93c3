"""Draw one step as SVG: a row for each partition, time from left to right, and a box for each cell.

The colours are Okabe and Ito's, which colour-blind people can tell apart; the kinds also differ in brightness. The
halves of a backward have a darker and a lighter shade of its colour.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchgpipe.listener.listener import NO_MICRO_BATCH, Kind
from torchgpipe.schedule.drawing import COLOURS, Box, draw_boxes
from torchgpipe.timeline.span import KINDS, TRANSFERS, Row, Span

__all__ = ["draw"]

_COLOURS: dict[Kind, str] = {
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
_FAILED = "#D00000"
_NARROWEST, _WIDEST = 720, 2880  # pixels


def draw(spans: Sequence[Span], rows: Sequence[Row], width: int | None = None) -> str:
    """Return a picture of the spans of one step.

    Args:
        spans: the spans of one step, at least one
        rows: the partitions
        width: the width of the picture in pixels (default: three quarters of the cells show their micro-batch)
    """
    begin = min(span.start for span in spans)
    seconds = max(span.end for span in spans) - begin
    has_copies = any(span.kind == "copy" for span in spans)
    distinct = len({row.device for row in rows}) == len(rows)
    drawn = [
        (
            str(row.device) if distinct else f"{row.partition} on {row.device}",
            [
                _box(span, begin, has_copies)
                for span in spans
                if span.partition == row.partition and span.kind not in TRANSFERS
            ],
        )
        for row in rows
    ]
    for device in dict.fromkeys(row.device for row in rows):
        for kind in TRANSFERS:
            lane = [_box(span, begin, False) for span in spans if (span.device, span.kind) == (device, kind)]
            drawn += [(f"{kind} {device}", lane)] if lane else []
    legend = {
        kind.replace(" of the", ":"): _COLOURS[kind] for kind in KINDS if any(span.kind == kind for span in spans)
    }
    legend |= {"failed": _FAILED} if any(span.failed for span in spans) else {}
    title = f"Step {spans[0].step}: {seconds * 1000:.1f} ms"
    return draw_boxes(drawn, seconds, width or _width(spans, seconds), title, legend)


def _width(spans: Sequence[Span], seconds: float) -> int:
    durations = sorted(span.seconds for span in spans if span.computes)
    short = durations[len(durations) // 4] if durations else 0.0
    return max(_NARROWEST, min(_WIDEST, round(100 + 16 * seconds / short))) if short else _NARROWEST


def _box(span: Span, begin: float, has_copies: bool) -> Box:
    of = "weights" if span.micro_batch == NO_MICRO_BATCH else f"micro-batch {span.micro_batch}"
    of += f", partition {span.partition}" * (span.kind in TRANSFERS)
    title = f"{span.kind} of {of}: {span.seconds * 1000:.2f} ms{', failed' * span.failed}"
    number = str(span.micro_batch) if span.computes else ""
    colour = _FAILED if span.failed else _COLOURS[span.kind]
    # Copies are a strip below the cells, which they may overlap in time.
    top, bottom = (0.84, 1.0) if span.kind == "copy" else (0.0, 0.8 if has_copies else 1.0)
    return Box(span.start - begin, span.end - begin, number, title, colour, top, bottom)
