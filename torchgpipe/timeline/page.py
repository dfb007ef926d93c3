"""Draw one step as SVG, which a notebook shows. This needs no Matplotlib; its colours are those of `drawing`."""

from __future__ import annotations

from collections.abc import Sequence

from torchgpipe.engine.record import NO_MICRO_BATCH
from torchgpipe.schedule.drawing import Box, draw_boxes
from torchgpipe.timeline.drawing import FAILED, KIND_COLOURS, KIND_INK
from torchgpipe.timeline.span import KINDS, TRANSFERS, Row, Span

__all__ = ["draw"]


def draw(spans: Sequence[Span], rows: Sequence[Row], width: int = 720) -> str:
    """Return a picture of the spans of one step.

    Args:
        spans: the spans of one step, at least one
        rows: the partitions
        width: the width of the picture in pixels
    """
    begin = min(span.start for span in spans)
    seconds = max(span.end for span in spans) - begin
    distinct = len({row.device for row in rows}) == len(rows)
    drawn = [
        (
            str(row.device) if distinct else f"{row.partition} on {row.device}",
            [_box(span, begin) for span in spans if span.partition == row.partition],
        )
        for row in rows
    ]
    legend = {
        kind.replace(" of the", ":"): KIND_COLOURS[kind] for kind in KINDS if any(span.kind == kind for span in spans)
    }
    legend |= {"failed": FAILED} if any(span.failed for span in spans) else {}
    return draw_boxes(drawn, seconds, width, f"Step {spans[0].step}: {seconds * 1000:.1f} ms", legend)


def _box(span: Span, begin: float) -> Box:
    of = "weights" if span.micro_batch == NO_MICRO_BATCH else f"micro-batch {span.micro_batch}"
    title = f"{span.kind} of {of}: {span.seconds * 1000:.2f} ms{', failed' * span.failed}"
    number = str(span.micro_batch) if span.computes else ""
    colour = FAILED if span.failed else KIND_COLOURS[span.kind]
    ink = "#fff" if span.failed else KIND_INK.get(span.kind, "")
    return Box(span.start - begin, span.end - begin, number, title, colour, ink, span.kind in ("copy", *TRANSFERS))
