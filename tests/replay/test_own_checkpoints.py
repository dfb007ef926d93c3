"""Layers that recompute themselves by PyTorch's checkpoint, in the workers of a step.

Such a layer sets the generator of the CPU to its state in forward, and afterwards back, without a look at other
threads: two layers at once drew each other's numbers, so did a layer in forward meanwhile, and one left the generator
where the other had set it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchgpipe import GPipe

X = torch.randn(12, 4, dtype=torch.float64)


class Own(nn.Module):
    def __init__(self, dropout: float, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.inner = nn.Sequential(nn.Linear(4, 64), nn.Dropout(dropout), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)
        return output


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZeroBubble"])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_draw_and_the_caller_draws_what_they_would_draw(dropout: float, mode: Any, schedule: Any) -> None:
    results = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(*[Own(dropout, recomputes) for _ in range(6)]).double()
        options: dict[str, Any] = {"schedule": schedule, "checkpoint": mode, "loss_fn": nn.functional.mse_loss}
        model = GPipe(layers, [2, 2, 2], devices=["cpu:0", "cpu:1", "cpu:2"], chunks=6, **options)
        seen = []
        for _ in range(8):
            loss = model.step(X, X)
            seen.append(torch.cat([loss[None], *[one.grad.flatten() for one in model.parameters()], torch.rand(3)]))
            model.zero_grad()
        results.append(torch.stack(seen))
    assert torch.equal(*results)
