"""Models and inputs, shared by the tests of `GPipe`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def make_model(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2, dtype=torch.float64) for _ in range(layers)))


def make_input(batch: int = 6) -> Tensor:
    return torch.randn(batch, 2, dtype=torch.float64, requires_grad=True)
