"""The Chrome trace has what Perfetto and chrome://tracing need."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import torchgpipe
from tests.separate_memory import separate_memory
from tests.timeline.synthetic import span
from tests.timeline.test_recorder import N, batch, gpipe
from torchgpipe.timeline.trace import events


def by_phase(saved: list[dict[str, Any]], ph: str) -> list[dict[str, Any]]:
    return [event for event in saved if event["ph"] == ph]


def test_a_saved_trace_has_the_structure_of_the_format(tmp_path: Path) -> None:
    model = gpipe([f"cpu:{j}" for j in range(N)])
    with separate_memory(model), torchgpipe.record(model) as timeline:
        for _ in range(2):
            model(batch()).sum().backward()
    timeline.save(tmp_path / "step.json")
    saved = json.loads((tmp_path / "step.json").read_text())
    assert saved["displayTimeUnit"] == "ms"
    all_events = saved["traceEvents"]
    assert {event["ph"] for event in all_events} == {"M", "X", "s", "f"}

    complete = by_phase(all_events, "X")
    assert [event["dur"] for event in complete] == pytest.approx([span.seconds * 1e6 for span in timeline.spans])
    for event in complete:
        assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert event["dur"] >= 0
        assert event["args"].keys() >= {"step", "micro-batch", "partition", "layers"}

    # Every row has a name: a process stands for a device, and a thread for one of its streams.
    processes = {e["pid"]: e["args"]["name"] for e in by_phase(all_events, "M") if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in by_phase(all_events, "M") if e["name"] == "thread_name"}
    assert list(processes.values()) == ["cpu:0", "cpu:1", "cpu:2"]
    rows = Counter((processes[event["pid"]], threads[event["pid"], event["tid"]]) for event in complete)
    assert rows == Counter((str(span.device), span.stream) for span in timeline.spans)


def test_an_arrow_goes_from_every_copy_to_the_wait_for_it() -> None:
    """A skip to the next partition travels beside the output."""
    spans = [
        span("copy", 0, 0, 0.0, 0.1, stream="leaving", other=1),
        span("wait", 0, 1, 0.0, 0.1, other=0),
        span("copy", 0, 0, 0.2, 0.3, stream="skip leaving", other=1),
        span("wait", 0, 1, 0.2, 0.3, other=0),
        span("copy", 1, 0, 0.4, 0.5, stream="leaving", other=1),  # an error came before the wait
    ]
    copies, starts, ends = (by_phase(events(spans), ph) for ph in "Xsf")
    assert [copy["args"]["to"] for copy in copies if copy["cat"] == "copy"] == [1, 1, 1]
    first, second = (event["id"] for event in starts)
    assert first != second
    assert [event["ts"] for event in starts] == [0.0, 0.2e6]
    assert [(event["ts"], event["id"], event["bp"]) for event in ends] == [(0.05e6, first, "e"), (0.25e6, second, "e")]
