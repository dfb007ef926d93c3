"""A plan is applied as planned, with every schedule, and does not change what is computed."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.balancing.planning.models import WIDTH, Residual, mean, mlp, quick, wide
from torchgpipe import GPipe
from torchgpipe.schedule import NAMES, ScheduleName
from torchgpipe_balancing import Plan

ROWS = 16


class Wide(nn.Module):
    """The layers of `wide`, in a module that is no Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(wide())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def tight(model: nn.Module, **options: Any) -> Plan:
    """Return a plan for so little memory that some layers are recomputed."""
    most = max(quick(model, checkpoint=False, **options).best.memory)
    plan = quick(model, memory=[0.9 * most] * 2, margin=0.0, **options)
    assert plan.recomputed
    return plan


def test_a_sequential_becomes_a_gpipe() -> None:
    model = wide().to("meta")
    plan = tight(model, chunks=4, loss_fn=mean)
    pipeline = plan.apply(wide())
    assert isinstance(pipeline, GPipe)
    assert pipeline.balance == plan.balance
    assert pipeline.devices == plan.devices == [torch.device("cpu:0"), torch.device("cpu:1")]
    assert (pipeline.chunks, pipeline.schedule) == (plan.chunks, plan.schedule) == (4, "1F1B")
    assert list(pipeline.checkpoint) == plan.recomputed


def test_nothing_recomputed_is_no_checkpoint() -> None:
    assert quick(mlp()).apply(mlp()).checkpoint == "never"


def test_any_module_is_pipelined_in_place() -> None:
    plan = tight(Wide().to("meta"), loss_fn=mean)
    model = Wide()
    kind, parameters = type(model), list(model.parameters())
    pipeline = plan.apply(model)
    assert pipeline is model
    assert isinstance(pipeline, kind)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [len(one.parts) for one in model.layout.partitions] == plan.balance
    assert [one.device for one in model.layout.partitions] == plan.devices
    begins = [one.parts[0].name for one in model.layout.partitions]
    assert begins == [f"blocks.{k}" for k in (0, plan.balance[0])]

    runs = dict.fromkeys(range(6), 0)
    for k, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, k=k: runs.update({k: runs[k] + 1}))
    model.step(torch.randn(ROWS, WIDTH))
    twice = [f"blocks.{k}" for k, count in runs.items() if count == 2 * plan.chunks]
    assert twice == plan.recomputed
    assert all(count in (plan.chunks, 2 * plan.chunks) for count in runs.values())


@pytest.mark.parametrize("make", [mlp, Residual])
@pytest.mark.parametrize("schedule", NAMES)
def test_gradients_are_those_of_the_plain_model(make: Any, schedule: ScheduleName) -> None:
    model = make().double()
    plain = copy.deepcopy(model)
    sample, target = torch.randn(4, WIDTH).double(), torch.randn(4, 1).double()
    plan = quick(model, sample, target=target, schedule=schedule, loss_fn=mean)
    pipeline = plan.apply(model)
    input, targets = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, 1).double()
    loss = pipeline.step(input, target=targets)
    whole = 0.0
    for x, y in zip(input.chunk(plan.chunks), targets.chunk(plan.chunks), strict=True):
        part = mean(plain(x), y) * (len(x) / ROWS)
        part.backward()
        whole += part.item()
    assert math.isclose(loss.item(), whole, rel_tol=1e-12)
    gradients = [one.grad for one in plain.parameters()]
    for actual, expected in zip(pipeline.parameters(), gradients, strict=True):
        torch.testing.assert_close(actual.grad, expected, rtol=1e-12, atol=1e-15)


def test_gradients_of_recomputed_layers_are_those_of_the_plain_model() -> None:
    model = Wide().double()
    plain = copy.deepcopy(model)
    plan = tight(Wide().double().to("meta"), sample=torch.randn(2, WIDTH).double(), loss_fn=mean)
    input = torch.randn(ROWS, WIDTH).double()
    plan.apply(model).step(input)
    for x in input.chunk(plan.chunks):
        (mean(plain(x), None) / plan.chunks).backward()
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("planned", "other", "message"),
    [
        (mlp(6), mlp(5), "6 layers, '0' to '5', but this model has no '5'"),
        (mlp(6), mlp(7), "6 layers, '0' to '5', but this model has 7"),
        (Residual(5), Residual(4), r"but this model has no 'blocks\.4'"),
        (Residual(5), mlp(6), r"but this model has no 'blocks\.0'"),
    ],
    ids=str,
)
def test_another_model_is_refused(planned: nn.Module, other: nn.Module, message: str) -> None:
    plan = quick(planned.to("meta"))
    with pytest.raises(ValueError, match=message):
        plan.apply(other)


def test_options_given_later_go_before_those_of_the_plan() -> None:
    model = mlp()
    plan = quick(model, loss_fn=mean)
    pipeline = plan.apply(model, loss_fn=lambda output, target: output.sum() * 0 + 7)
    assert pipeline.step(torch.randn(ROWS, WIDTH)).item() == 7
