"""Training and evaluation in turns, and layers that are frozen and thawed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.layers import Using
from tests.plain import assert_same, outcome, plain_outcome

pytestmark = pytest.mark.usefixtures("rounded")

LAYERS = [nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()]


@pytest.fixture
def module() -> nn.Sequential:
    return copy.deepcopy(nn.Sequential(*LAYERS)).double()


def data(rows: int) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64)


@pytest.mark.parametrize("off", [torch.inference_mode, nullcontext])
def test_training_and_evaluation_in_turns(
    pipe: Pipe, checkpoint: str, off: Callable[[], Any], module: nn.Sequential
) -> None:
    """Training does not fail on tensors that evaluation leaves behind, above all inference tensors.

    The first evaluation comes before any training.
    """
    model = pipe(copy.deepcopy(module), [2, 2, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        for each in [module, model]:
            each.eval()
        with off():
            for rows in (3, 1, 4):
                x = data(rows)
                torch.testing.assert_close(model(x), module(x))
        for each in [module, model]:
            each.train()
        assert_same(outcome(model, x), plain_outcome(module, x, chunks=2))


def test_layers_are_frozen_and_thawed_between_steps(pipe: Pipe, checkpoint: str) -> None:
    """Gradual unfreezing works because the pipeline reads `requires_grad` at each call."""
    module = nn.Sequential(*[Using(lambda linear, x: linear(x).tanh()) for _ in range(3)]).double()
    model, x = pipe(copy.deepcopy(module), [1, 1, 1], chunks=2, checkpoint=checkpoint), data(5)
    for thawed in [[2], [1, 2], [0, 1, 2], [0]]:
        for layers in [module, model]:
            for k, layer in enumerate(layers):
                layer.requires_grad_(k in thawed)
        assert_same(outcome(model, x), plain_outcome(module, x, chunks=2))
