"""Steps under autocast: the cells of all devices cast at the same time, and share one cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgpipe
from tests.layers import Using
from torchgpipe import GPipe

pytestmark = pytest.mark.late

M = 4


def tied() -> nn.Module:
    """Return a layer that uses a weight twice: two casts of it, and not one, would round its gradient differently."""
    return Using(lambda linear, x: linear(linear(x).tanh()).tanh(), width=8)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def stepped(model: nn.Module, run: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        run()
        optimizer.step()
    return [one.detach().cpu() for parameter in model.parameters() for one in (parameter, parameter.grad)]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["GPipe", "pipelined"])
@pytest.mark.parametrize(
    "schedule, places, checkpoint",
    [
        ("GPipe", [0, 1, 2], "never"),
        ("1F1B", [0, 1, 2], "always"),
        ("ZeroBubble", [0, 1, 2], "never"),
        ("Interleaved1F1B", [0, 1, 0, 1], "always"),
    ],
)
def test_a_step_gives_what_the_plain_model_gives(kind: str, schedule: Any, places: list[int], checkpoint: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[tied() for _ in places])
    plain = copy.deepcopy(module).to("late:0")
    x, y = torch.randn(2 * M, 8), torch.randn(2 * M, 8)
    devices, n = [f"late:{place}" for place in places], len(places)
    options: Any = {"devices": devices, "chunks": M, "schedule": schedule, "loss_fn": loss_fn, "checkpoint": checkpoint}
    model: Any
    if kind == "GPipe":
        model = GPipe(module, [1] * n, **options)
    else:
        model = torchgpipe.pipelined(module, torch.randn(4, 8), balance=[1] * n, **options)

    def step() -> None:
        with torch.autocast("late", torch.bfloat16):
            model.step(x, y) if kind == "GPipe" else model.step(x, target=y)

    def plain_step() -> None:
        parts = list(zip(x.to("late:0").chunk(M), y.to("late:0").chunk(M)))
        losses = []
        for one, target in parts:
            with torch.autocast("late", torch.bfloat16):
                losses.append(loss_fn(plain(one), target) / M)
        for loss in losses[::-1] if schedule == "GPipe" else losses:
            loss.backward()

    torch.testing.assert_close(stepped(module, step), stepped(plain, plain_step), rtol=1e-6, atol=1e-7)
