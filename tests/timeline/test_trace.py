"""The Chrome trace has what Perfetto and chrome://tracing need."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import torchgpipe
from tests.separate_memory import separate_memory
from tests.timeline.test_recorder import N, batch, gpipe


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
    assert {event["ph"] for event in all_events} == {"M", "X"}

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
