"""Models, inputs and a recording layer, shared by the tests of `GPipe`."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn

Pair = namedtuple("Pair", ["first", "second"])


def make_model(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2, dtype=torch.float64) for _ in range(layers)))


def make_input(batch: int = 6) -> Tensor:
    return torch.randn(batch, 2, dtype=torch.float64, requires_grad=True)


class Recorder(nn.Module):
    """A layer that remembers its inputs and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, *inputs: Any) -> Any:
        self.seen.append(inputs if len(inputs) > 1 else inputs[0])
        return inputs[0]
