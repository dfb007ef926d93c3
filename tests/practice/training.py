"""A model, mini-batches of two sizes, and the plain reference, shared by the tests of training loops."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BALANCE", "CHUNKS", "batches", "make_layers"]

CHUNKS = 3
BALANCE = [2, 1, 3]


def make_layers() -> nn.Sequential:
    """Return layers from (batch, 4) to scores of 3 classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 3))


def batches(steps: int, accumulate: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """Return mini-batches for each step, the last one smaller."""
    draw = torch.Generator().manual_seed(1)
    sizes = [9] * (accumulate - 1) + [7]
    return [
        [(torch.randn(size, 4, generator=draw), torch.randint(3, (size,), generator=draw)) for size in sizes]
        for _ in range(steps)
    ]
