"""Devices: what is not there is refused where it is asked for, and not where memory is first allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe

MODEL, X = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(4, 2)


@pytest.mark.parametrize(
    "asked",
    [
        lambda devices: torchgpipe.GPipe(MODEL, [1, 1], devices=devices),
        lambda devices: torchgpipe.pipelined(MODEL, X, chunks=2, devices=devices),
        lambda devices: torchgpipe.plan(MODEL, X, batch=4, devices=devices),
    ],
    ids=["GPipe", "pipelined", "plan"],
)
@pytest.mark.parametrize(
    ("devices", "count", "said"),
    [
        (["cuda:0", "cuda:1"], 0, "'cuda:0' is not there: PyTorch sees no GPU; .*devices=\\['cpu', 'cpu'\\]"),
        (["cpu", "cuda"], 0, "'cuda' is not there: PyTorch sees no GPU; "),
        (["cpu", "cuda:2"], 2, "'cuda:2' is not there: PyTorch sees 2 GPUs; the last is 'cuda:1'"),
    ],
)
def test_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, asked: Callable[[Any], Any], devices: list[str], count: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=said):
        asked(devices)
