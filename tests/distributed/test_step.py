"""A step over several processes equals that of the plain model, micro-batch by micro-batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.distributed.launch import launch, needs_stages
from tests.distributed.models import (
    Counter,
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


def steps(schedule: str, balance: list[int], checkpoint: str = "never") -> None:
    plain = mlp(sum(balance))
    model = DistributedGPipe(
        copy.deepcopy(plain), balance, chunks=4, schedule=schedule, loss_fn=F.mse_loss, checkpoint=checkpoint
    )
    for size in [8, 5, 1]:
        input, target = data(size)
        for module in (plain, model):
            module.zero_grad()
        expected = plain_step(plain, input, target, 4)
        loss = model.step(input, target)
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
        assert_gradients(model, plain, exact=len(balance) == dist.get_world_size())
        with torch.no_grad():
            assert torch.equal(model.step(input, target), loss)
        output = model.eval_step(input, gather=True)
        torch.testing.assert_close(output, plain(input))
        assert (model.eval_step(input) is None) == (dist.get_rank() < dist.get_world_size() - 1)


def smaller(size: int) -> list[str]:
    model = DistributedGPipe(mlp(), [3, 3], chunks=4, loss_fn=F.mse_loss)
    with warnings.catch_warnings(record=True) as caught:
        for each in [8, size, size, 8, size]:
            model.step(*data(each))
            model.eval_step(data(each)[0])
    return [f"{warning.filename}: {warning.message}" for warning in caught]


def test_a_mini_batch_too_small_for_the_schedule_says_what_runs_it() -> None:
    """A bug: another schedule, which needs more memory, ran silently instead."""
    for (said,) in launch(2, smaller, 1):
        for part in [__file__, "1 micro-batches", "chunks=4", "'1F1B'", "'GPipe'", "drop_last=True"]:
            assert part in said
    assert launch(2, smaller, 2) == [[], []]


def an_optimizer_made_before() -> None:
    with torch.device("meta"):
        module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    model = DistributedGPipe(module, [3, 3], chunks=4, loss_fn=F.mse_loss)
    before = copy.deepcopy(model.state_dict())
    model.step(*data(8))
    optimizer.step()
    assert all(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def everything_steps(schedule: str, deferred: bool) -> None:
    n = dist.get_world_size()
    for checkpoint in ["always", "except_last", "never"]:
        plain = everything()
        model = DistributedGPipe(
            copy.deepcopy(plain),
            {2: [3, 9], 4: [3, 3, 2, 4]}[n],
            chunks=4,
            schedule=schedule,
            checkpoint=checkpoint,
            loss_fn=cross_entropy,
            weight=weigh,
            deferred_batch_norm=deferred,
        )
        if deferred:
            plain = DeferredBatchNorm.convert_deferred_batch_norm(plain)
        for size in [8, 11]:
            input, target = tokens(size)
            plain.zero_grad()
            model.zero_grad()
            with mini_batch(4):
                expected = plain_step(plain, input, target, 4, cross_entropy, weigh)
            torch.testing.assert_close(model.step(input, target), expected, rtol=1e-14, atol=0)
            # A tensor that crosses a boundary becomes contiguous, and kernels round differently for other strides.
            assert_gradients(model, plain, exact=False)
            buffers = dict(plain.named_buffers())
            for name, buffer in model.named_buffers():
                torch.testing.assert_close(buffer, buffers[name], rtol=1e-12, atol=1e-12)
        for layer in model.children():
            if isinstance(layer, Counter):
                assert (layer.runs, layer.first_runs) == (8, {"always": 8, "except_last": 6, "never": 0}[checkpoint])
        assert set(model.state_dict()) == {
            k for k in plain.state_dict() if k.split(".")[0] in dict(model.named_children())
        }
        plain.eval()
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model.eval_step(input, gather=True), plain(input))


def of_two() -> None:
    for schedule in ["GPipe", "LoopedBFS", "Interleaved1F1B", "ZeroBubble", "InterleavedZeroBubble"]:
        steps(schedule, [1, 2, 2, 1])  # several stages in each process
    steps("Interleaved1F1B", [2, 1, 1, 2], "always")
    everything_steps("1F1B", True)
    everything_steps("GPipe", False)
    an_optimizer_made_before()


def of_four() -> None:
    for schedule in ["GPipe", "1f1b"]:
        steps(schedule, [1, 2, 2, 1])
    everything_steps("1F1B", False)


@pytest.mark.parametrize(("n", "cases"), [(2, of_two), (4, of_four)])
def test_a_step_equals_that_of_the_plain_model(n: int, cases: Callable[[], None]) -> None:
    """Also with skips, batch norms, checkpoints, frozen layers and integer tensors."""
    launch(n, cases, limit=120)
