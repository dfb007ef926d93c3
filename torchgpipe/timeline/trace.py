"""Write a timeline as a Chrome trace: JSON that Perfetto and chrome://tracing draw.

The format is Google's "Trace Event Format". Times are microseconds. A process stands for a device, and its threads for
the device's streams; events of the type ``M`` name them. A span is a complete event (``X``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchgpipe.listener.listener import NO_MICRO_BATCH
from torchgpipe.timeline.span import Span

__all__ = ["events", "write"]


def write(spans: Sequence[Span], path: Path) -> None:
    """Write spans into a file."""
    path.write_text(json.dumps({"traceEvents": events(spans), "displayTimeUnit": "ms"}), encoding="utf-8")


def events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return all events of the trace."""
    tracks = _tracks(spans)
    return [*_names(tracks), *(_complete(span, tracks[_key(span)]) for span in spans)]


def _key(span: Span) -> tuple[str, str]:
    return str(span.device), span.stream


def _tracks(spans: Iterable[Span]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the numbers of the process and the thread that stand for each stream."""
    devices = {str(span.device): None for span in sorted(spans, key=lambda span: span.partition)}
    tracks = {}
    for pid, device in enumerate(devices):
        streams = {span.stream for span in spans if str(span.device) == device}
        for tid, stream in enumerate(sorted(streams, key=lambda stream: (stream != "computing", stream))):
            tracks[device, stream] = (pid, tid)
    return tracks


def _names(tracks: dict[tuple[str, str], tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for (device, stream), (pid, tid) in tracks.items():
        if tid == 0:
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": device}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": stream}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _complete(span: Span, track: tuple[int, int]) -> dict[str, Any]:
    pid, tid = track
    return {
        "ph": "X",
        "name": _title(span),
        "cat": span.kind,
        "ts": span.start * 1e6,
        "dur": span.seconds * 1e6,
        "pid": pid,
        "tid": tid,
        "args": {
            "step": span.step,
            "micro-batch": span.micro_batch,
            "partition": span.partition,
            "layers": list(span.layers),
            **({} if span.other is None else {"to" if span.kind == "copy" else "for": span.other}),
            **({"failed": True} if span.failed else {}),
        },
    }


def _title(span: Span) -> str:
    where = "" if span.other is None else f" {'to' if span.kind == 'copy' else 'for'} partition {span.other}"
    of = "of weights" if span.micro_batch == NO_MICRO_BATCH else span.micro_batch
    return f"{span.kind} {of}{where}{' (failed)' if span.failed else ''}"
