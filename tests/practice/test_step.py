"""A step in the ways that people train: compiled, adapters, clipping, mixed precision, optimizers in hooks."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgpipe
from tests.conftest import Devices
from tests.test_step import assert_equal, data, grads_of, mlp, plain_step, stepping

sys.path.append(str(Path(torchgpipe.__file__).parent.parent / "examples"))

schedules = pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZeroBubble"])


def expected_of(module: nn.Module, x: Tensor, y: Tensor, schedule: str) -> Tensor:
    """Run the plain model on four micro-batches, in the order of the schedule."""
    targets = y.chunk(4)
    return plain_step(
        module,
        list(x.chunk(4)),
        lambda i, output: F.mse_loss(output, targets[i]) * (len(targets[i]) / len(y)),
        schedule,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@schedules
def test_compiled_partitions(devices: Devices, schedule: str) -> None:
    torch.compiler.reset()
    x, y = data()
    options: dict[str, Any] = {"balance": [2, 2], "schedule": schedule, "checkpoint": "never"}
    model, plain = stepping(mlp(), devices(2), **options), mlp()
    model.compile(backend="eager")
    for _ in range(2):
        assert torch.equal(model.step(x, y), expected_of(plain, x, y, schedule))
        assert_equal(grads_of(model), grads_of(plain))
        model.zero_grad()
        plain.zero_grad()


@schedules
def test_adapters_in_frozen_layers(devices: Devices, schedule: str) -> None:
    pytest.importorskip("tqdm")
    from adapters import Block, adapt

    torch.manual_seed(0)
    module = nn.Sequential(*[Block(8) for _ in range(4)]).requires_grad_(False)
    adapt(module[1], rank=2)
    adapt(module[3], rank=2)
    module = module.double()
    x, y = torch.randn(8, 3, 8, dtype=torch.float64), torch.randn(8, 3, 8, dtype=torch.float64)
    plain = copy.deepcopy(module)
    model = stepping(module, devices(4), schedule=schedule)
    assert torch.equal(model.step(x, y), expected_of(plain, x, y, schedule))
    assert_equal(grads_of(model), grads_of(plain))
    assert {name for name, grad in grads_of(model).items() if grad is not None} == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }


@schedules
def test_clipped_gradients(devices: Devices, schedule: str) -> None:
    x, y = data()
    model, plain = stepping(mlp(), devices(4), schedule=schedule), mlp()
    model.step(x, y)
    expected_of(plain, x, y, schedule)
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01) for one in (model, plain)]
    assert torch.equal(norms[0], norms[1])
    assert_equal(grads_of(model), grads_of(plain))


@schedules
def test_optimizers_that_step_in_hooks(devices: Devices, schedule: str) -> None:
    """Each parameter's optimizer steps when the gradient of the mini-batch is there, and frees the gradient."""
    x, y = data()
    model, other = stepping(mlp(), devices(4), schedule=schedule), stepping(mlp(), devices(4), schedule=schedule)
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    adam = torch.optim.Adam(other.parameters())
    for _ in range(3):
        loss = other.step(x, y)
        adam.step()
        adam.zero_grad()
        assert torch.equal(model.step(x, y), loss)
    assert_equal(dict(model.named_parameters()), dict(other.named_parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


@schedules
def test_mixed_precision(devices: Devices, schedule: str) -> None:
    """With a scaler, autocast, and an optimizer that skips what is infinite."""
    x, y = (value.float() for value in data())
    model, plain = stepping(mlp().float(), devices(4), schedule=schedule), mlp().float()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**16) for _ in range(2)]
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.step(x, y, scaler=scalers[0])
        losses = []
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses.append(scalers[1].scale(F.mse_loss(plain(part), target) * (2 / 8)))
        for loss in losses[:: -1 if schedule == "GPipe" else 1]:
            loss.backward()
        assert_equal(grads_of(model), grads_of(plain))
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))
