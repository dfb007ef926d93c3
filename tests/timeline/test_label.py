"""The profiler's trace labels each cell by name, only while the profiler runs."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import torchgpipe
from torchgpipe import GPipe
from torchgpipe.engine.label import labelled
from torchgpipe.frames.pipelined import pipelined_apart

M, N = 2, 2


def all_labels(checkpoint: str) -> Counter[str]:
    again = {"always": M, "except_last": M - 1, "never": 0}[checkpoint]
    kinds = [("forward", M), ("recomputation", again), ("backward", M)]
    return Counter(
        f"torchgpipe: {kind}, micro-batch {i}, partition {j}" for kind, m in kinds for i in range(m) for j in range(N)
    )


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize("kind", ["always", "except_last", "never", "recorded", "pipelined"])
def test_the_profiler_shows_every_cell(kind: str, devices: list[str]) -> None:
    """As documented: without this setting the profiler sees its own thread and the engine's work for it."""
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    mode = "never" if kind in ("recorded", "pipelined") else kind
    if kind == "pipelined":
        model: Any = pipelined_apart(module, torch.randn(2, 3), chunks=M, devices=devices)
    else:
        model = GPipe(module, [1, 1], devices=devices, chunks=M, checkpoint=mode)
    has_threads = kind == "pipelined" or len(set(devices)) > 1
    setting = torch.profiler._ExperimentalConfig(profile_all_threads=has_threads)
    recording = torchgpipe.record(model) if kind == "recorded" else nullcontext()
    with profile(activities=[ProfilerActivity.CPU], experimental_config=setting) as profiler, recording:
        model(torch.randn(4, 3)).sum().backward()
    names = [event.name for event in profiler.events() or ()]
    assert Counter(name for name in names if name.startswith("torchgpipe: ")) == all_labels(mode)


def test_without_the_profiler_there_are_no_labels() -> None:
    assert labelled(None) is None
    with profile(activities=[ProfilerActivity.CPU]):
        assert labelled(None) is not None
