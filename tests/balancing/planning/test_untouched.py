"""Planning and checking leave the model and the program as they were, also where measuring fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.balancing.planning.models import WIDTH, Residual, mlp, quick, state_of


class Failing(nn.Module):
    """A layer that fails where a micro-batch is larger than the sample, as all are that are measured."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.rows:
            raise ArithmeticError(f"{len(x)} rows")
        return x


def sequential(rows: int = 1000) -> nn.Module:
    """Return a Sequential with all that a run could change, in an unusual state."""
    norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return prepared(nn.Sequential(*mlp(2), norm, nn.Dropout(), Failing(rows), nn.Linear(WIDTH, WIDTH)))


def module(rows: int = 1000) -> nn.Module:
    """Return another module with all that a run could change."""
    model = Residual()
    model.blocks.insert(2, nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(), Failing(rows)))
    return prepared(model)


def prepared(model: nn.Module) -> nn.Module:
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    parameters[1].requires_grad_(False)
    parameters[2].register_hook(lambda gradient: gradient)
    for k, one in enumerate(model.modules()):
        one.training = bool(k % 2)
        one.register_forward_pre_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("make", [sequential, module])
def test_a_plan_and_its_check_change_nothing(make: Callable[[], nn.Module]) -> None:
    model, sample = make(), torch.randn(4, WIDTH, requires_grad=True)
    before, rows = state_of(model), sample.tolist()
    plan = quick(model, sample)
    assert state_of(model) == before
    plan.check(model, steps=1)
    assert state_of(model) == before
    assert sample.grad is None
    assert sample.tolist() == rows


@pytest.mark.parametrize("make", [sequential, module])
def test_the_error_of_a_layer_passes_and_changes_nothing(make: Callable[[int], nn.Module]) -> None:
    model, sample = make(2), torch.randn(2, WIDTH)
    before = state_of(model)
    with pytest.raises(ArithmeticError, match=r"\d+ rows"):
        quick(model, sample)
    assert state_of(model) == before
