"""The ends of threads: a call that returns or raises has left none at work, also after an interrupt."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layers import Apply
from torchgpipe import GPipe, pipelined
from torchgpipe.drive import workers
from torchgpipe.run import threads

pytestmark = pytest.mark.usefixtures("cpu_workers")

DEVICES = ["cpu:0", "cpu:1"]


def test_the_threads_of_a_call_have_ended_when_it_returns() -> None:
    """What a thread keeps is dropped when it ends."""
    own, gone = threading.local(), []

    class Kept:
        def __del__(self) -> None:
            sum(range(10**6))
            gone.append(None)

    def keep(x: Tensor) -> Tensor:
        own.kept = Kept()
        return x

    GPipe(nn.Sequential(Apply(keep), Apply(keep)), [1, 1], devices=DEVICES)(torch.ones(1))
    assert len(gone) == 2


@pytest.fixture
def join_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as Python 3.11 does: `Thread.join` returns at once if it was interrupted before."""
    for module in (workers, threads):
        monkeypatch.setattr(module, "join", lambda _: None)


@pytest.mark.usefixtures("join_returns_at_once")
def test_a_call_that_fails_waits_for_the_frames_that_it_cancels() -> None:
    begun, ended = [], []

    class Slow(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            begun.append(None)
            try:
                return super().forward(x)
            finally:
                sum(range(10**6))
                ended.append(None)

    def fail(*_: Any) -> None:
        raise KeyError("a layer")

    model = pipelined(Slow(*[nn.Linear(4, 4) for _ in range(4)]), torch.ones(2, 4), chunks=3, devices=DEVICES)
    begun.clear()
    ended.clear()
    model[3].register_forward_hook(fail)
    with pytest.raises(KeyError, match="a layer"):
        model(torch.ones(6, 4))
    assert len(ended) == len(begun) > 1
