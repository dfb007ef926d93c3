"""Replicas of a GPipe in several processes step as one process does on all of their data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.launch import launch
from tests.distributed.models import cross_entropy, everything, tokens, weigh
from tests.distributed.test_replicas import mean_over_all
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm

pytestmark = pytest.mark.slow


def of_all(places: list[str]) -> None:
    """Everything at once: tied skips, batch norms, targets without weight, mini-batches of different sizes."""
    rank = dist.get_rank()
    plain: Any = everything()
    mine = copy.deepcopy(plain)
    if rank == 1:  # All begin with the parameters of the first.
        for parameter in mine.parameters():
            torch.nn.init.constant_(parameter, 3.0)
    model = GPipe(
        mine,
        [3, 9],
        devices=places,
        chunks=4,
        loss_fn=cross_entropy,
        weight=weigh,
        deferred_batch_norm=True,
        replicas=dist.group.WORLD,
    )
    plain = DeferredBatchNorm.convert_deferred_batch_norm(plain)
    heard: list[Tensor] = []
    next(model.parameters()).register_hook(lambda grad: heard.append(grad.clone()))
    for step, sizes in enumerate([(8, 8), (8, 5), (3, 9)]):
        parts = [tokens(size + k) for k, size in enumerate(sizes)]
        before = [None if p.grad is None else p.grad.clone() for p in plain.parameters()]
        expected = mean_over_all(plain, parts, cross_entropy, weigh)
        loss = model.step(*parts[rank])
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-10, atol=1e-12, msg=name)
        whole = next(plain.parameters()).grad - (0 if before[0] is None else before[0])  # type: ignore[operator]
        torch.testing.assert_close(heard[step], whole, rtol=1e-9, atol=1e-12)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, dict(plain.named_buffers())[name], rtol=1e-12, atol=1e-12)
    assert len(heard) == 3


class Faulty(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("no")
        return x


def of_failures() -> list[str]:
    """One replica fails, before the step or in it: the other one says so, and both go on."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Faulty(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    layers[2].requires_grad_(False)
    model: Any = GPipe(layers, [1, 3], devices=["cpu", "cpu"], chunks=2, loss_fn=F.mse_loss, replicas=dist.group.WORLD)
    x, y = torch.rand(4, 4, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64)
    model.step(x, y)
    grads = {name: p.grad for name, p in model.named_parameters()}
    kept = copy.deepcopy(grads)
    said = []
    for target, model[1].fails in [(y, dist.get_rank() == 1), (y[: 4 - dist.get_rank()], False)]:
        with pytest.raises((RuntimeError, ArithmeticError, ValueError)) as info:
            model.step(x, target)
        said.append(f"{info.type.__name__}: {info.value}")
        for name, parameter in model.named_parameters():
            assert parameter.grad is grads[name]
            assert parameter.grad is None or torch.equal(parameter.grad, kept[name])
    model.step(x, y)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, 2 * kept[name])
    return said


def both() -> list[str]:
    of_all(["cpu", "cpu"])
    of_all(["cpu:0", "cpu:1"])
    return of_failures()


def test_replicas_step_as_one_process_on_all_of_their_data() -> None:
    first, second = launch(2, both)
    assert second == [
        "ArithmeticError: no",
        "ValueError: input and target must have the same size in dimension 0, the batch, but have 4 and 3",
    ]
    assert first == [
        "RuntimeError: the step failed in another replica, which raises the error; .grad is as it was before",
        "RuntimeError: the preparation of a step failed in another replica, which raises the error; .grad is as it "
        "was before",
    ]
