"""The profiler's trace labels each cell by name, only while the profiler runs."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import torchgpipe
from tests.timeline.test_recorder import N, all_cells, any_module, batch, gpipe
from torchgpipe.listener.label import labelled


@pytest.mark.parametrize("devices", [["cpu"] * N, [f"cpu:{j}" for j in range(N)]], ids=["inline", "workers"])
@pytest.mark.parametrize("kind", ["always", "except_last", "never", "recorded", "pipelined"])
def test_the_profiler_shows_every_cell(kind: str, devices: list[str]) -> None:
    """As documented: without this setting the profiler sees its own thread and the engine's work for it."""
    mode = "never" if kind in ("recorded", "pipelined") else kind
    model = any_module(devices) if kind == "pipelined" else gpipe(devices, checkpoint=mode)
    has_threads = kind == "pipelined" or len(set(devices)) > 1
    setting = torch.profiler._ExperimentalConfig(profile_all_threads=has_threads)
    recording = torchgpipe.record(model) if kind == "recorded" else nullcontext()
    with profile(activities=[ProfilerActivity.CPU], experimental_config=setting) as profiler, recording:
        model(batch()).sum().backward()
    names = [event.name for event in profiler.events() or ()]
    assert Counter(name for name in names if name.startswith("torchgpipe: ")) == Counter(
        f"torchgpipe: {what}, micro-batch {i}, partition {j}" for what, i, j in all_cells(mode)
    )


def test_without_the_profiler_there_are_no_labels() -> None:
    assert labelled(None) is None
    with profile(activities=[ProfilerActivity.CPU]):
        assert labelled(None) is not None
