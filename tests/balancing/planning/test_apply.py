"""A plan is applied as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.balancing.planning.models import WIDTH, Residual, mean, mlp, quick, wide
from torchgpipe import GPipe
from torchgpipe_balancing import Plan

ROWS = 16


def module() -> nn.Module:
    """Return the layers of `wide`, in a module that is no Sequential."""
    model = Residual(6)
    model.blocks = nn.ModuleList(wide())
    return model


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


def test_any_module_is_pipelined_in_place() -> None:
    plan = tight(module().to("meta"), loss_fn=mean)
    model = module()
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
