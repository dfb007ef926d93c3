"""Optimizers, schedulers and clipping treat a pipeline's parameters like those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler

from tests.accelerator import DEVICE, needs_accelerator
from tests.conftest import Pipe
from tests.plain import run_plain
from tests.practice.training import BALANCE, CHUNKS, batches, make_layers
from torchgpipe import GPipe

STEPS = 6

Optimizer: TypeAlias = torch.optim.Optimizer
Run: TypeAlias = Callable[[Tensor], Tensor]


def train(
    model: nn.Module,
    run: Run,
    make_optimizer: Callable[[Any], Optimizer],
    make_schedule: Callable[[Optimizer], Any] = lambda optimizer: None,
    clip: Callable[[Iterable[Tensor]], Any] = lambda parameters: None,
) -> tuple[list[Any], list[Tensor]]:
    """Return the norms of clipping and the learning rates in each step, and the parameters at the end."""
    decayed = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("weight")]
    optimizer = make_optimizer([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}])
    schedule = make_schedule(optimizer)
    seen: list[Any] = []
    for [(x, y)] in batches(STEPS):
        loss = F.cross_entropy(run(x), y)
        loss.backward()
        seen.append(clip(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(loss.item())
        elif schedule is not None:
            schedule.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return seen, [parameter.detach() for parameter in model.parameters()]


def assert_trains_like_the_plain_model(pipe: Pipe, *recipe: Any) -> None:
    plain = make_layers()
    layers = copy.deepcopy(plain)
    seen, parameters = train(layers, pipe(layers, BALANCE, chunks=CHUNKS), *recipe)
    expected_seen, expected = train(plain, partial(run_plain, plain, chunks=CHUNKS), *recipe)
    assert seen == expected_seen
    assert all(map(torch.equal, parameters, expected))
    assert not any(map(torch.equal, expected, make_layers().parameters())), "nothing has been trained"


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)], ids=["AdamW", "SGD"])
def test_optimizers_of_every_kind_of_loop(pipe: Pipe, kind: Callable[..., Optimizer], options: dict[str, bool]) -> None:
    """Update one parameter at a time, all parameters of a device at once, or in one kernel; with groups and options."""
    clip = partial(clip_grad_norm_, max_norm=0.1, foreach=options.get("foreach"))
    assert_trains_like_the_plain_model(pipe, partial(kind, lr=0.01, **options), lambda optimizer: None, clip)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam])
def test_other_optimizers(pipe: Pipe, kind: Callable[..., Optimizer]) -> None:
    assert_trains_like_the_plain_model(pipe, partial(kind, lr=0.01))


@pytest.mark.parametrize(
    "clip",
    [
        *(partial(clip_grad_norm_, max_norm=0.1, norm_type=norm) for norm in (1.0, 2.0, float("inf"))),
        partial(clip_grad_value_, clip_value=0.01),
    ],
    ids=["norm 1", "norm 2", "norm inf", "value"],
)
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping(pipe: Pipe, clip: Callable[..., Any], foreach: bool) -> None:
    """The norm is one number over the parameters of all devices."""
    assert_trains_like_the_plain_model(
        pipe, partial(torch.optim.SGD, lr=0.5), lambda optimizer: None, partial(clip, foreach=foreach)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.01, 0.02], total_steps=STEPS),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
            [2],
        ),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1),
    ],
    ids=["one cycle", "cosine", "warm-up", "plateau"],
)
def test_schedules(pipe: Pipe, make: Callable[[Optimizer], Any]) -> None:
    assert_trains_like_the_plain_model(pipe, partial(torch.optim.AdamW, lr=0.01), make)


@pytest.mark.late
@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9, lr=0.01)], ids=["AdamW", "SGD"]
)
def test_a_step_right_after_backward_waits_for_every_device(checkpoint: str, kind: Callable[..., Optimizer]) -> None:
    plain, layers = make_layers().double(), make_layers().double()
    model = GPipe(layers, BALANCE, devices=["late:0", "late:1", "late:2"], chunks=CHUNKS, checkpoint=checkpoint)
    expected = train_without_clipping(plain, lambda x: run_plain(plain, x.double(), chunks=CHUNKS), kind)
    assert train_without_clipping(model, lambda x: model(x.double()).cpu(), kind) == pytest.approx(expected, rel=1e-12)
    for mine, its in zip(layers.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.cpu(), its)


def train_without_clipping(model: nn.Module, run: Run, kind: Callable[..., Optimizer]) -> list[float]:
    optimizer = kind(model.parameters(), foreach=False)
    losses = []
    for [(x, y)] in batches(3):
        loss = F.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs_accelerator
@pytest.mark.parametrize("scale", [0.0, 2.0**10])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_gpu_and_the_cpu_in_one_optimizer(options: dict[str, bool], scale: float) -> None:
    """The norm is one number over the parameters of both devices; each parameter is unscaled and updated in place."""
    if options and scale:
        pytest.skip("PyTorch brings what GradScaler has found from device to device, and does not wait for it")
    plain, layers = make_layers().double(), make_layers().double()
    model = GPipe(layers, [3, 3], devices=[DEVICE, "cpu"], chunks=CHUNKS)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, **options) for net in (plain, model)]
    for [(x, y)] in batches(4):
        norms = []
        for net, optimizer in zip((plain, model), optimizers):
            scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
            scaler.scale(F.cross_entropy(net(x.double()), y)).backward()
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(net.parameters(), 0.1))
            scaler.step(optimizer)
            optimizer.zero_grad()
        torch.testing.assert_close(norms[1].cpu(), norms[0])
    for actual, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(actual.cpu(), expected)
