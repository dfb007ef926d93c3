"""A pipeline compares itself with its layers, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.conftest import Pipe
from tests.layers import Apply, Using
from tests.skip.layers import Pop, Stash

pytestmark = pytest.mark.usefixtures("rounded")


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_all_is_compared_and_nothing_left_behind(pipe: Pipe, mode: str) -> None:
    layers = [Stash(lambda x: x), nn.Linear(4, 4), nn.BatchNorm1d(4), Pop(torch.add), nn.Linear(4, 3)]
    model = pipe(nn.Sequential(*layers), [2, 3], chunks=3, checkpoint=mode, loss_fn=functional.cross_entropy)
    calls: list[str] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append("hook"))
    model[4].weight.grad = torch.ones(3, 4)
    parameters = dict(model.named_parameters())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, random = torch.randn(6, 4), torch.get_rng_state()
    table = model.verify(x, target=torch.randint(3, (6,), generator=torch.Generator().manual_seed(0)))
    assert table.is_equal, table
    names = [row.name for row in table.rows]
    assert {"output value", "buffer 2.running_mean", "gradient of 1.weight", "output ['loss'] of a step"} <= {*names}
    assert {"output value in evaluation, rows together and apart", "output value in evaluation"} <= {*names}
    assert not calls
    assert torch.equal(torch.get_rng_state(), random)
    assert all([parameters[name] is parameter for name, parameter in model.named_parameters()])
    assert all([torch.equal(state[name], tensor) for name, tensor in model.state_dict().items()])
    assert model[1].weight.grad is None
    assert torch.equal(model[4].weight.grad, torch.ones(3, 4))


def test_layers_that_draw_are_compared_in_evaluation(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), [2, 1], chunks=2)
    assert model.verify(torch.randn(4, 4)).is_equal
    assert model.training and model[1].training


def test_layers_that_draw_in_evaluation_too_cannot_be_compared(pipe: Pipe) -> None:
    noise = Apply(lambda x: x + torch.rand_like(x))
    model = pipe(nn.Sequential(nn.Linear(4, 4), noise), [1, 1], chunks=2)
    assert "layers draw random numbers in evaluation, too" in model.verify(torch.randn(4, 4)).faults[0]


def test_a_layer_that_couples_rows(pipe: Pipe) -> None:
    centered = Using(lambda linear, x: linear(x - x.mean(0)))
    model = pipe(nn.Sequential(nn.Linear(4, 4), centered), [1, 1], chunks=2)
    table = model.verify(torch.randn(4, 4))
    assert "a layer couples the rows" in table.faults[0]
    assert str(table).endswith(table.faults[0])


class _Penalty(torch.autograd.Function):
    """Adds a gradient of its own on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad + torch.ones_like(grad) / len(grad)


def test_a_gradient_that_does_not_follow_that_of_the_output(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Linear(4, 4), Apply(_Penalty.apply)), [1, 1], chunks=2)
    assert "adds a gradient that does not follow" in model.verify(torch.randn(4, 4)).faults[0]


def test_nan_shows_nothing(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2)
    with pytest.raises(ValueError, match="the output 'value' has nan in the plain model"):
        model.verify(torch.full((4, 4), torch.nan))
