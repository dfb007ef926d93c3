"""Replicas of a GPipe in several processes step as one process does on all of their data."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe
from tests.distributed.launch import launch
from tests.distributed.models import EVERYTHING, assert_step, everything
from tests.layers import Apply, With
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.gradients.replicas import Replicas

pytestmark = pytest.mark.slow


def of_all(places: list[str]) -> None:
    """Everything at once: tied skips, batch norms, targets without weight, mini-batches of different sizes."""
    rank = dist.get_rank()
    plain = everything()
    mine = copy.deepcopy(plain)
    if rank == 1:  # All begin with the parameters of the first.
        for parameter in mine.parameters():
            torch.nn.init.constant_(parameter, 3.0)
    options = {**EVERYTHING.options, "deferred_batch_norm": True, "replicas": dist.group.WORLD}
    model = GPipe(mine, [3, 9], devices=places, **options)
    plain = DeferredBatchNorm.convert_deferred_batch_norm(plain)
    heard: list[Tensor] = []
    next(model.parameters()).register_hook(lambda grad: heard.append(grad.clone()))
    whole = next(plain.parameters())
    before = torch.zeros(())
    for sizes in [(8, 8), (8, 5), (3, 9)]:
        assert_step(EVERYTHING, model, plain, sizes, rank)
        assert whole.grad is not None
        torch.testing.assert_close(heard[-1], whole.grad - before, rtol=1e-9, atol=1e-12)
        before = whole.grad.clone()
    assert len(heard) == 3


def of_failures() -> None:
    """One replica fails, before a step, in it, or behind its last cell: the other one says so, and both go on.

    In the other one, gradients once were added, or an exchange waited.
    """
    here = dist.get_rank()
    fails = ""

    def fail(kind: str) -> None:
        if here == 1 and kind == fails:
            raise ArithmeticError(kind)

    def layer(x: Tensor) -> Tensor:
        fail("layer")
        return x

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        values = output[:, : len(output)] if here == 1 and fails == "values" else output
        return F.mse_loss(output, target), values

    layers = nn.Sequential(nn.Linear(4, 4), Apply(layer), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    layers[3].requires_grad_(False)
    options: dict[str, Any] = {"chunks": 2, "deferred_batch_norm": True, "loss_fn": loss_fn}
    model: Any = copy.deepcopy(GPipe(layers, [1, 4], devices=["cpu"] * 2, replicas=dist.group.WORLD, **options))
    model[4].weight.register_hook(lambda _: fail("hook"))
    x, y = torch.rand(2, 5, 4, dtype=torch.float64)
    model.step(x, y)
    grads = {name: p.grad for name, p in model.named_parameters()}
    kept = copy.deepcopy(grads)
    raises = "failed in another replica, which raises the error"
    for fails, own, other in [
        ("layer", "layer", rf"the step {raises}; \.grad is as it was before"),
        (
            "target",
            r"5 rows in dimension 0, but the target is of shape \(4, 4\)",
            rf"the preparation of a step {raises}; \.grad is as it was before",
        ),
        ("hook", "hook", f"the end of the step {raises}"),
        ("values", "Sizes of tensors must match except in dimension 0", f"the step {raises}"),
    ]:
        with pytest.raises((RuntimeError, ArithmeticError, ValueError), match=own if here == 1 else other):
            model.step(x, y[:4] if here == 1 and fails == "target" else y)
        for name, parameter in model.named_parameters():
            assert parameter.grad is grads[name]
            assert parameter.grad is None or torch.equal(parameter.grad, kept[name])
    fails = ""
    model.step(x, y)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, 2 * kept[name])


def of_differences() -> None:
    """Replicas that would exchange different tensors; the process was killed."""
    here = dist.get_rank()

    def replica(balance: list[int], bias: bool = True, **options: Any) -> GPipe:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=bias), nn.Linear(4, 4))
        return GPipe(layers, balance, loss_fn=F.mse_loss, replicas=dist.group.WORLD, **options)

    x, y = torch.rand(2, 4, 4)
    with pytest.raises(ValueError, match="replicas must have the same layers"):
        replica([3], bias=here == 0)
    frozen = replica([3])
    frozen[0].requires_grad_(here == 0)
    with pytest.raises(ValueError, match="as many of them on each device, and the same frozen parameters"):
        frozen.step(x, y)
    # Layers on a device may be divided, joined or recorded in one replica only.
    model = replica([1, 2] if here else [2, 1], devices=["cpu"] * 2, checkpoint=["1"] if here else "never")
    with torchgpipe.record(model) if here == 0 else nullcontext():
        model.step(x, y)
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    whole = grads.clone()
    dist.broadcast(whole, 0)
    assert torch.equal(grads, whole)
    with torch.set_grad_enabled(here == 0), pytest.raises(ValueError, match="all run with gradients or all without"):
        replica([3]).step(x, y)


def of_sparse_gradients() -> None:
    """The replica without the gradient waited for the others."""
    embedding = nn.Embedding(4, 4, sparse=True)
    in_one = With(embedding, lambda it, x: x + it(torch.zeros(len(x), dtype=torch.long)) if dist.get_rank() else x)
    model = GPipe(nn.Sequential(nn.Linear(4, 4), in_one), [2], loss_fn=F.mse_loss, replicas=dist.group.WORLD)
    with pytest.raises(ValueError, match="sparse gradients cannot be added up over replicas"):
        model.step(*torch.rand(2, 4, 4))
    assert all(parameter.grad is None for parameter in model.parameters())


def of_losses() -> None:
    """Each replica proves the loss function on its own share, and class weights are those of all targets."""
    here = dist.get_rank()
    x, y = torch.rand(8, 4, dtype=torch.float64), torch.arange(8) % 4
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    for tensor in (x, *plain.parameters()):
        dist.broadcast(tensor.data, 0)
    for loss_fn in (nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3, 5]).double()), nn.CrossEntropyLoss(reduction="sum")):
        layers = copy.deepcopy(plain)
        loss = loss_fn(plain(x), y)
        plain.zero_grad()
        loss.backward()
        rows = slice(0, 3) if here == 0 else slice(3, 8)
        model = GPipe(layers, [2], chunks=2, loss_fn=loss_fn, replicas=dist.group.WORLD)
        torch.testing.assert_close(model.step(x[rows], y[rows]), loss.detach())
        for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    model = GPipe(
        copy.deepcopy(plain),
        [2],
        chunks=2,
        loss_fn=lambda output, _: output.square().sum() if here else output.square().mean(),
        replicas=dist.group.WORLD,
    )
    with pytest.raises((RuntimeError, ValueError), match="it is a sum" if here else "the step failed in another rep"):
        model.step(x)
    assert all(parameter.grad is None for parameter in model.parameters())


def of_memory() -> None:
    """Gradients and their sums were there at the same time, all of them."""
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    model = GPipe(layers, [4], loss_fn=F.mse_loss, replicas=dist.group.WORLD)
    own: list[Any] = []
    there: list[int] = []
    all_reduce, add_gradients = dist.all_reduce, Replicas.add_gradients

    def begin(self: Replicas, parameters: Sequence[Tensor], grads: list[Any]) -> Any:
        own.extend([weakref.ref(grad) for grad in grads if grad is not None])
        return add_gradients(self, parameters, grads)

    def count(*args: Any, **keywords: Any) -> None:
        there.append(sum(one() is not None for one in own))
        all_reduce(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchgpipe.gradients.replicas._BUCKET", 1)
        patch.setattr(Replicas, "add_gradients", begin)
        patch.setattr(dist, "all_reduce", count)
        model.step(*torch.rand(2, 4, 4))
    assert [count for count in there if count] == [4, 3, 2, 1]


def both() -> None:
    of_all(["cpu", "cpu"])
    of_all(["cpu:0", "cpu:1"])
    of_failures()
    of_differences()
    of_sparse_gradients()
    of_losses()
    of_memory()


def test_replicas_step_as_one_process_on_all_of_their_data() -> None:
    launch(2, both)
