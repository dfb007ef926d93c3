"""A step over several processes does what the plain model does, micro-batch by micro-batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.launch import launch
from torchgpipe.distributed import DistributedGPipe


def mlp(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential()
    for k in range(layers):
        model.append(nn.Linear(4, 4) if k % 2 == 0 else nn.Tanh())
    return model.double()


def data(size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=draw).double(), torch.randn(size, 4, generator=draw).double()


def plain_step(model: nn.Module, input: Tensor, target: Tensor, chunks: int) -> Tensor:
    """The mean loss, and its gradients, one micro-batch after the other."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(input.chunk(chunks), target.chunk(chunks)):
        loss = F.mse_loss(model(x), y) * (len(x) / len(input))
        loss.backward()
        total += loss.detach()
    return total


def assert_gradients(model: DistributedGPipe, plain: nn.Module, exact: bool = True) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        tolerance = 0 if exact else 1e-12
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def steps(schedule: str, balance: list[int], options: dict[str, Any]) -> None:
    plain = mlp()
    model = DistributedGPipe(copy.deepcopy(plain), balance, chunks=4, schedule=schedule, loss_fn=F.mse_loss, **options)
    for size in [8, 8, 10, 5, 1, 8]:
        input, target = data(size)
        for module in (plain, model):
            module.zero_grad()
        expected = plain_step(plain, input, target, 4)
        loss = model.step(input, target)
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
        assert_gradients(model, plain, exact=schedule in ("GPipe", "1F1B"))
        with torch.no_grad():
            assert torch.equal(model.step(input, target), loss)
        output = model.eval_step(input, gather=True)
        torch.testing.assert_close(output, plain(input))
        assert (model.eval_step(input) is None) == (dist.get_rank() < dist.get_world_size() - 1)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_step_equals_that_of_the_plain_model(n: int, schedule: str) -> None:
    launch(n, steps, schedule, {2: [3, 3], 4: [1, 2, 2, 1]}[n], {})
