"""The Chrome trace has what Perfetto and chrome://tracing need."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchgpipe
from tests.clocks import clocked
from tests.timeline.synthetic import span
from torchgpipe import GPipe
from torchgpipe.timeline.timeline import Timeline
from torchgpipe.timeline.trace import events

M, N = 3, 3


def recorded() -> Timeline:
    layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(N)])
    model = GPipe(layers, [1] * N, devices=[f"cpu:{j}" for j in range(N)], chunks=M)
    with clocked(model), torchgpipe.record(model) as timeline:
        for _ in range(2):
            model(torch.randn(2 * M, 3)).sum().backward()
    return timeline


def by_phase(saved: list[dict[str, Any]], ph: str) -> list[dict[str, Any]]:
    return [event for event in saved if event["ph"] == ph]


def test_a_saved_trace_has_the_structure_of_the_format(tmp_path: Path) -> None:
    timeline = recorded()
    timeline.save(tmp_path / "step.json")
    saved = json.loads((tmp_path / "step.json").read_text())
    assert saved["displayTimeUnit"] == "ms"
    all_events = saved["traceEvents"]
    assert {event["ph"] for event in all_events} == {"M", "X", "s", "f"}

    complete = by_phase(all_events, "X")
    assert len(complete) == len(timeline.spans)
    for event in complete:
        assert {"name", "cat", "ts", "dur", "pid", "tid", "cname", "args"} <= event.keys()
        assert event["dur"] >= 0
        assert event["args"].keys() >= {"step", "micro-batch", "partition", "layers"}

    # Every row has a name: a process stands for a device, and a thread for one of its streams.
    processes = {e["pid"]: e["args"]["name"] for e in by_phase(all_events, "M") if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in by_phase(all_events, "M") if e["name"] == "thread_name"}
    assert list(processes.values()) == ["cpu:0", "cpu:1", "cpu:2"]
    rows = Counter((processes[event["pid"]], threads[event["pid"], event["tid"]]) for event in complete)
    assert rows == Counter((str(span.device), span.stream) for span in timeline.spans)


def test_an_arrow_goes_from_every_copy_to_the_wait_for_it() -> None:
    all_events = events(recorded().spans)
    complete, starts, ends = (by_phase(all_events, ph) for ph in "Xsf")

    def around(event: dict[str, Any]) -> dict[str, Any]:
        row = event["pid"], event["tid"]
        (found,) = [
            one
            for one in complete
            if (one["pid"], one["tid"]) == row and one["ts"] <= event["ts"] <= one["ts"] + one["dur"]
        ]
        return found

    assert len(starts) == len(ends) == len([event for event in complete if event["cat"] == "copy"]) > 0
    assert len({event["id"] for event in starts}) == len(starts)
    for start, end in zip(sorted(starts, key=lambda e: e["id"]), sorted(ends, key=lambda e: e["id"]), strict=True):
        assert start["id"] == end["id"]
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        copy, wait = around(start), around(end)
        assert (copy["cat"], wait["cat"]) == ("copy", "wait")
        assert copy["args"]["to"] == wait["args"]["partition"]
        assert wait["args"]["for"] == copy["args"]["partition"]
        for what in ("step", "micro-batch"):
            assert copy["args"][what] == wait["args"][what]


def test_two_copies_between_the_same_partitions_have_a_wait_each() -> None:
    """A skip to the next partition travels beside the output."""
    spans = [
        span("copy", 0, 0, 0.0, 0.1, stream="leaving", other=1),
        span("wait", 0, 1, 0.0, 0.1, other=0),
        span("copy", 0, 0, 0.2, 0.3, stream="skip leaving", other=1),
        span("wait", 0, 1, 0.2, 0.3, other=0),
        span("copy", 1, 0, 0.4, 0.5, stream="leaving", other=1),  # an error came before the wait
    ]
    assert [event["ts"] for event in by_phase(events(spans), "s")] == [0.0, 0.2 * 1e6]
    assert [event["ts"] for event in by_phase(events(spans), "f")] == [0.05 * 1e6, 0.25 * 1e6]


def test_times_are_microseconds_and_kinds_have_colours() -> None:
    spans = [
        span("forward", 0, 0, 1.0, 1.5),
        span("recomputation", 0, 0, 2.0, 2.5),
        span("backward", 0, 0, 3.0, 3.5, failed=True),
    ]
    forward, recomputation, backward = by_phase(events(spans), "X")
    assert (forward["ts"], forward["dur"], forward["name"]) == (1e6, 0.5e6, "forward 0")
    assert len({event["cname"] for event in (forward, recomputation, backward)}) == 3
    assert (backward["cname"], backward["name"], backward["args"]["failed"]) == (
        "terrible",
        "backward 0 (failed)",
        True,
    )
