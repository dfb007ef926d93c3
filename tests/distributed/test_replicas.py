"""Two pipelines of two stages train like one process on both of their mini-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.distributed.launch import launch, needs_stages
from tests.distributed.models import (
    assert_gradients,
    cross_entropy,
    data,
    everything,
    mlp,
    plain_step,
    tokens,
    weigh,
)
from torchgpipe.batchnorm import DeferredBatchNorm, mini_batch
from torchgpipe.distributed import DistributedGPipe

pytestmark = [pytest.mark.slow, needs_stages]


def mean_over_all(model: nn.Module, parts: list[tuple[Tensor, Tensor]], loss_fn: Any, weight: Any) -> Tensor:
    """Run a step in one process on the micro-batches of all parts."""
    inputs = [x for input, _ in parts for x in input.chunk(4)]
    targets = [y for _, target in parts for y in target.chunk(4)]
    total = sum(float(weight(y)) for y in targets)
    losses = torch.zeros((), dtype=torch.float64)
    with mini_batch(len(inputs)):
        for x, y in zip(inputs, targets):
            loss = loss_fn(model(x), y) * (float(weight(y)) / total)
            loss.backward()
            losses += loss.detach()
    return losses


def joined() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
    replica = mesh.get_local_rank("replicas")
    for make, draw, loss_fn, weight, balance in [
        (mlp, data, F.mse_loss, len, [3, 3]),
        (everything, tokens, cross_entropy, weigh, [3, 9]),
    ]:
        plain: Any = make()
        model = DistributedGPipe(
            copy.deepcopy(plain),
            balance,
            chunks=4,
            loss_fn=loss_fn,
            weight=None if weight is len else weight,
            deferred_batch_norm=True,
            mesh=mesh,
        )
        plain = DeferredBatchNorm.convert_deferred_batch_norm(plain)
        for sizes in [(8, 8), (8, 5), (3, 9)]:
            parts = [draw(size + k) for k, size in enumerate(sizes)]
            expected = mean_over_all(plain, parts, loss_fn, weight)
            loss = model.step(*parts[replica])
            torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
            assert_gradients(model, plain, exact=False)  # the gradients of all steps so far
            for name, buffer in model.named_buffers():
                torch.testing.assert_close(buffer, dict(plain.named_buffers())[name], rtol=1e-12, atol=1e-12)


def clipped() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for norm_type in (2.0, 1.0, float("inf")):
        plain = mlp()
        model = DistributedGPipe(copy.deepcopy(plain), [3, 3], chunks=4, loss_fn=F.mse_loss, mesh=mesh)
        input, target = data(8)
        plain_step(plain, input, target, 4)
        model.step(input, target)
        norm = model.clip_grad_norm_(0.01, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
        torch.testing.assert_close(norm, expected)
        assert_gradients(model, plain, exact=False)


def refused() -> str | None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = DistributedGPipe(mlp(), [3, 3], chunks=4, loss_fn=F.mse_loss, mesh=mesh)
    input, target = data(8)
    with pytest.raises((RuntimeError, ValueError)) as error:
        model.step(input[:3] if dist.get_rank() == 3 else input, target)
    torch.testing.assert_close(model.step(input, target), plain_step(mlp(), input, target, 4))
    return f"{error.value}"


def everything_of_replicas() -> str | None:
    joined()
    clipped()
    return refused()


def test_replicas_learn_as_one_process_does_on_all_of_their_data() -> None:
    said = launch(4, everything_of_replicas)
    assert said[3] == "input and target must have the same size in dimension 0, the batch, but have 3 and 8"
    assert said[2] == "rank 3 could not prepare the step, and says why; nothing was sent"
    assert said[0] == said[1] == "another replica could not prepare the step, and says why; nothing was sent"
