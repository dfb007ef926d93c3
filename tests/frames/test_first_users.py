"""What bad arguments and samples ran into: each was wrong, or an error without a name."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe

DEVICES = ["cpu:0", "cpu:1"]


class Tower(nn.Module):
    """Six blocks with an activation that has no parameters, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
        self.tanh = nn.Tanh()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = self.tanh(block(x))
        return self.head(x)


def pipelined(model: nn.Module, sample: Any = None, **options: Any) -> Any:
    return torchgpipe.pipelined(
        model, torch.randn(2, 8) if sample is None else sample, chunks=4, devices=DEVICES, **options
    )


@pytest.mark.parametrize("kind", [Tensor.numpy, lambda y: deque([y])])
def test_an_output_that_does_not_compare_is_refused_by_name(kind: Any) -> None:
    """The error was that of its comparison, without a name."""

    class Other(Tower):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"y": y, "other": kind(y.detach())}

    with pytest.raises(ValueError, match=r"the output 'other' is .*, which differs between micro-batches"):
        pipelined(Other())


@pytest.mark.parametrize("setting", ["loss_fn", "weight"])
def test_a_function_that_is_none_is_an_error(setting: str) -> None:
    """It was one in the first step only, without a name."""
    for make in (
        pipelined,
        lambda model, **given: torchgpipe.GPipe(nn.Sequential(model), [1], devices=["cpu"], **given),
    ):
        with pytest.raises(TypeError, match=f"{setting} must be a function, .*, but got 'mse'"):
            make(Tower(), **{setting: "mse"})


class Neighbours(nn.Module):
    """Has a table for all rows, and takes its rows by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor | None = None, y: Tensor | None = None, *, table: Tensor) -> Any:
        z: Any = y if x is None else x
        for block in self.blocks:
            z = block(z) + table.sum(0)
        return z


def test_rows_are_those_of_what_is_split() -> None:
    """They were those of the table, so that every micro-batch got all rows of the other."""
    model, table, y = Neighbours().double(), torch.randn(5, 8, dtype=torch.float64), torch.randn(6, 8).double()
    expected = model(table=table, y=y)
    pipelined(model, {"x": y[:3], "table": table})
    torch.testing.assert_close(model(table=table, y=y), expected, rtol=1e-12, atol=1e-12)


def test_a_sample_without_rows_is_refused() -> None:
    """Every micro-batch got all rows of later mini-batches."""
    with pytest.raises(ValueError, match=r"the sample has no rows in \['x'\]"):
        pipelined(Tower(), torch.randn(0, 8))
