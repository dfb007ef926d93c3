"""If a process of a model over processes fails or hangs in a call, all others raise, and name whom they waited for.

Steps, and processes that are killed, are in `test_faults`.
"""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchgpipe
from tests.distributed.launch import launch
from torchgpipe.processes.stand_in import StandIn

pytestmark = pytest.mark.slow


class Faulty(torch.autograd.Function):
    """Passes a tensor through, and harms its process forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str, kind: str) -> Tensor:
        ctx.kind = kind if where == "backward" else ""
        if where == "forward":
            harm(kind)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        harm(ctx.kind)
        return grad, None, None


def harm(kind: str) -> None:
    if kind == "raises":
        raise ArithmeticError("out of luck")
    if kind == "hangs":
        threading.Event().wait()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        #: Where harm is done, its kind, and after how many micro-batches.
        self.harm, self.calls = ("", "", 0), 0

    def forward(self, x: Tensor) -> Tensor:
        where, kind, after = self.harm
        if kind and not isinstance(x, StandIn):
            self.calls += 1
            if self.calls > after:
                x = Faulty.apply(x, where, kind)
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def learn(where: str, kind: str) -> list[str]:
    """Return the errors of this process: in the second call, in which one comes to harm, and of one call more."""
    torch.manual_seed(0)
    model, mesh = Model(), dist.init_device_mesh("cpu", (3,))
    torchgpipe.pipelined(model, torch.randn(2, 4), chunks=4, mesh=mesh, balance=[2, 1, 1], timeout=timedelta(seconds=8))
    victim = model.blocks[2]
    assert isinstance(victim, Block)

    def call() -> None:
        model(torch.randn(8, 4)).backward()

    call()
    victim.harm = where, kind, 1
    said = []
    for _ in range(2):
        with pytest.raises((RuntimeError, ArithmeticError)) as info:
            call()
            call()  # A process that waits for nothing more in backward is told when it prepares the next one.
        said.append("\n".join([type(info.value).__name__, str(info.value), *getattr(info.value, "__notes__", [])]))
    return said


@pytest.mark.parametrize(("where", "kind"), [("backward", "raises"), ("forward", "hangs")])
def test_all_others_tell(where: str, kind: str) -> None:
    said = launch(3, learn, where, kind, victim=1)
    for rank in (0, 2):
        first, again = said[rank]
        waited = r"rank (\d), partition (\d) of 3 has waited in step \d+ for .* from rank ([\d, ]+), in vain"
        match = re.search(waited, first)
        assert match, first
        assert int(match[1]) == int(match[2]) == rank, first
        assert "start all of them again from the last checkpoint" in first, first
        assert kind != "raises" or "rank 1 has failed with ArithmeticError: out of luck" in first, first
        assert "has closed its connections" in again, again
