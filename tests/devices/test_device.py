"""Devices: what is not there is refused where it is asked for, and not where memory is first allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe
from tests.conftest import with_accelerators

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


def test_one_device_splits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody with one card hopes that its memory will last, and nothing said that it will not."""
    with_accelerators(monkeypatch, 1)
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"cpu:0 is the only device here.* or offload=True where a model is larger"):
        torchgpipe.pipelined(layers, X, chunks=2, loss_fn=nn.functional.mse_loss).unpipelined()
    torchgpipe.pipelined(layers, X, chunks=2, loss_fn=nn.functional.mse_loss, devices=["cpu"])


@pytest.mark.parametrize(
    "asked",
    [
        lambda: torchgpipe.GPipe(MODEL, [1, 1]),
        lambda: torchgpipe.pipelined(MODEL, X, chunks=2),
        lambda: torchgpipe.plan(MODEL, X, batch=4),
    ],
    ids=["GPipe", "pipelined", "plan"],
)
def test_processes_of_a_launcher_do_not_share_all_devices(
    monkeypatch: pytest.MonkeyPatch, asked: Callable[[], Any]
) -> None:
    """Each of them had its own pipeline over all cards, until memory ran out."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with_accelerators(monkeypatch, 2)
    with pytest.raises(RuntimeError, match="has started 2 processes here, and each would use all 2 devices; start the"):
        asked()
    with pytest.raises(ValueError, match="balance is required"):  # Which has devices of its own, and another mistake.
        torchgpipe.GPipe(MODEL, devices=["cpu"])
    with_accelerators(monkeypatch, 1)  # As with CUDA_VISIBLE_DEVICES for each process.
    torchgpipe.GPipe(MODEL, [2])
