"""The profiler's trace labels each cell by name, only while the profiler runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import torchgpipe
from torchgpipe import GPipe
from torchgpipe.engine.label import labelled

M, N = 2, 2


def model_on(devices: list[str], checkpoint: str) -> GPipe:
    return GPipe(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=devices, chunks=M, checkpoint=checkpoint
    )


def labels(profiler: Any) -> Counter[str]:
    names = [event.name for event in profiler.events()]
    return Counter(name for name in names if name.startswith("torchgpipe: "))


def all_labels(checkpoint: str) -> Counter[str]:
    again = {"always": M, "except_last": M - 1, "never": 0}[checkpoint]
    kinds = [("forward", M), ("recomputation", again), ("backward", M)]
    return Counter(
        f"torchgpipe: {kind}, micro-batch {i}, partition {j}" for kind, m in kinds for i in range(m) for j in range(N)
    )


@pytest.mark.parametrize("recording", [False, True])
def test_the_profiler_shows_every_cell(checkpoint: str, recording: bool) -> None:
    model = model_on(["cpu", "cpu"], checkpoint)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        if recording:
            with torchgpipe.record(model) as timeline:
                model(torch.randn(4, 3)).sum().backward()
            assert len(timeline.spans) == all_labels(checkpoint).total()
        else:
            model(torch.randn(4, 3)).sum().backward()
    assert labels(profiler) == all_labels(checkpoint)


def test_the_profiler_shows_the_cells_of_all_threads_when_it_is_set_to(checkpoint: str) -> None:
    """As documented: without this setting the profiler sees its own thread and the engine's work for it."""
    model = model_on(["cpu:0", "cpu:1"], checkpoint)
    setting = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=setting) as profiler:
        model(torch.randn(4, 3)).sum().backward()
    assert labels(profiler) == all_labels(checkpoint)


def test_the_profiler_shows_the_cells_of_a_pipelined_model() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torchgpipe.pipelined(model, torch.randn(2, 3), chunks=M, devices=["cpu:0", "cpu:1"])
    setting = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=setting) as profiler:
        model(torch.randn(4, 3)).sum().backward()
    assert labels(profiler) == all_labels("never")


def test_without_the_profiler_there_are_no_labels() -> None:
    assert labelled(None) is None
    with profile(activities=[ProfilerActivity.CPU]):
        assert labelled(None) is not None
