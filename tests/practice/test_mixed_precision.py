"""Mixed precision and gradient accumulation: the loop of the documentation, once with a pipeline and once without.

Both are equal to the last bit, steps that are skipped because a gradient overflows included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import Pipe
from tests.plain import run_plain
from torchgpipe import GPipe

CHUNKS = 3
BALANCE = [2, 1, 3]

Context = Callable[[], AbstractContextManager[Any]]


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 3)
    )


def batches(steps: int, accumulate: int) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step some mini-batches, the last of them smaller."""
    draw = torch.Generator().manual_seed(1)
    sizes = [9] * (accumulate - 1) + [7]
    return [
        [(torch.randn(size, 4, generator=draw), torch.randint(3, (size,), generator=draw)) for size in sizes]
        for _ in range(steps)
    ]


@dataclass
class History:
    """What happens in each step, and the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


def train(
    layers: nn.Sequential, run: Callable[[Tensor], Tensor], autocast: Context, scale: float = 0.0, accumulate: int = 1
) -> History:
    """A loop as users write it.

    Args:
        layers: are trained
        run: the model
        autocast: around the model and the loss
        scale: of the loss at first; 0 for no scaling
        accumulate: how many mini-batches there are in a step
    """
    history = History()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale > 0)
    for step in batches(6, accumulate):
        optimizer.zero_grad()
        for x, y in step:
            with autocast():
                loss = F.cross_entropy(run(x).float(), y) / len(step)
            scaler.scale(loss).backward()
            history.losses.append(loss.item())
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(layers.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        history.norms.append(norm.item())
        history.scales.append(scaler.get_scale())
    history.parameters = [parameter.detach() for parameter in layers.parameters()]
    return history


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # the first step is skipped
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(None, 0.0), (torch.bfloat16, 0.0), (torch.float16, 2.0**10), (torch.float16, 2.0**19)]
)
def test_training_is_that_of_the_plain_model(
    pipe: Pipe, checkpoint: str, dtype: torch.dtype | None, scale: float, accumulate: int
) -> None:
    autocast: Context = nullcontext if dtype is None else partial(torch.autocast, "cpu", dtype)
    plain = make_layers()
    layers = copy.deepcopy(plain)
    model = pipe(layers, BALANCE, chunks=CHUNKS, checkpoint=checkpoint)
    # A checkpointed micro-batch casts its own weights, and one that is not shares those of autocast's cache.
    within, each = (autocast, nullcontext) if checkpoint == "never" else (nullcontext, autocast)
    expected = train(plain, partial(run_plain, plain, chunks=CHUNKS, each=each), within, scale, accumulate)
    actual = train(layers, model, autocast, scale, accumulate)

    assert actual.losses == expected.losses
    assert actual.norms == pytest.approx(expected.norms, rel=0, abs=0, nan_ok=True)
    assert actual.scales == expected.scales
    assert all(map(torch.equal, actual.parameters, expected.parameters))

    overflowed = not all(norm < float("inf") for norm in actual.norms)
    assert overflowed == (scale == 2.0**19)
    assert any(after < before for before, after in pairwise([scale, *actual.scales])) == overflowed


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)], ids=["AdamW", "SGD"])
def test_optimizers_see_the_parameters_of_the_plain_model(
    pipe: Pipe, make: Callable[..., torch.optim.Optimizer], options: dict[str, bool]
) -> None:
    """All at once, in groups with options of their own, and with a schedule and clipping over all of them."""
    plain = make_layers()
    layers = copy.deepcopy(plain)
    model = pipe(layers, BALANCE, chunks=CHUNKS)
    ends = []
    for net, run in ((plain, partial(run_plain, plain, chunks=CHUNKS)), (layers, model)):
        owner = model if run is model else net
        decayed = [parameter for name, parameter in owner.named_parameters() if name.endswith("weight")]
        others = [parameter for name, parameter in owner.named_parameters() if not name.endswith("weight")]
        optimizer = make([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01, **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.02], total_steps=6)
        norms = []
        for [(x, y)] in batches(6, 1):
            F.cross_entropy(run(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(owner.parameters(), 0.1, foreach=options.get("foreach")).item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        ends.append((norms, [parameter.detach() for parameter in owner.parameters()]))
    (expected_norms, expected), (actual_norms, actual) = ends
    assert actual_norms == expected_norms
    assert all(map(torch.equal, actual, expected))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_gpu_and_the_cpu_in_one_optimizer(options: dict[str, bool]) -> None:
    """The norm is one number over the parameters of both, and each is updated where it is."""
    places = ["cuda:0", "cpu"]
    plain, layers = make_layers().double(), make_layers().double()
    model = GPipe(layers, [3, 3], devices=places, chunks=CHUNKS)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, **options) for net in (plain, model)]
    for [(x, y)] in batches(4, 1):
        F.cross_entropy(plain(x.double()), y).backward()
        F.cross_entropy(model(x.double()), y).backward()
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.1) for net in (plain, model)]
        torch.testing.assert_close(norms[1].cpu(), norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for actual, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(actual.cpu(), expected)
