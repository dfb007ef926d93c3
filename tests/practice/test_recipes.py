"""Training with clipping, a schedule, accumulation and mixed precision, and optimizers that step in backward.

A pipeline is trained as the plain model is, to the last bit, including steps that are skipped because a gradient
overflows. `pipelined/test_clients.py` has trainers and their settings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, lr_scheduler

from tests.accelerator import DEVICE, KIND, needs_accelerator
from tests.conftest import Devices, Pipe
from tests.plain import run_plain
from torchgpipe import GPipe

STEPS = 6
CHUNKS = 3
BALANCE = [2, 1, 3]


def make_layers() -> nn.Sequential:
    """Return layers from (batch, 4) to scores of 3 classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 3))


def batches(steps: int, accumulate: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """Return mini-batches for each step, the last one smaller."""
    draw = torch.Generator().manual_seed(1)
    sizes = [9] * (accumulate - 1) + [7]
    return [
        [(torch.randn(size, 4, generator=draw), torch.randint(3, (size,), generator=draw)) for size in sizes]
        for _ in range(steps)
    ]


def train(
    layers: nn.Sequential, run: Callable[[Tensor], Tensor], within: Callable[[], Any], scale: float, accumulate: int
) -> dict[str, Any]:
    """Train layers that ``run`` runs, as users write it, and return the events of each step, and the parameters.

    Args:
        within: what the loss is computed in
        scale: the first scale of the loss; 0 for no scaling
        accumulate: the number of mini-batches in a step
    """
    named = [*layers.named_parameters()]
    decayed = {"params": [parameter for name, parameter in named if name.endswith("weight")], "weight_decay": 0.1}
    optimizer = AdamW([decayed, {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.02}], lr=0.01)
    schedule = lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale > 0)
    losses, norms, rates, scales = [], [], [], [scale]
    for step in batches(STEPS, accumulate):
        optimizer.zero_grad()
        for x, y in step:
            with within():
                loss = F.cross_entropy(run(x).float(), y) / accumulate
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        norms.append(clip_grad_norm_(layers.parameters(), 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        scales.append(scaler.get_scale())
    parameters = [parameter.detach() for parameter in layers.parameters()]
    return {"losses": losses, "norms": norms, "rates": rates, "scales": scales, "parameters": parameters}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # the first step is skipped
@pytest.mark.parametrize(
    ("dtype", "scale", "accumulate", "checkpoint"),
    [
        (None, 0.0, 3, "always"),
        (torch.bfloat16, 0.0, 1, "except_last"),
        (torch.float16, 2.0**10, 3, "never"),
        (torch.float16, 2.0**19, 1, "always"),
    ],
)
def test_mixed_precision_and_accumulation(
    pipe: Pipe, checkpoint: str, dtype: torch.dtype | None, scale: float, accumulate: int
) -> None:
    plain = make_layers()
    layers = copy.deepcopy(plain)
    autocast = nullcontext if dtype is None else partial(torch.autocast, "cpu", dtype)
    # A checkpointed micro-batch casts its own weights; the others share those in autocast's cache.
    within, each = (autocast, nullcontext) if checkpoint == "never" else (nullcontext, autocast)
    expected = train(plain, partial(run_plain, plain, chunks=CHUNKS, each=each), within, scale, accumulate)
    model = pipe(layers, BALANCE, chunks=CHUNKS, checkpoint=checkpoint)
    actual = train(layers, model, autocast, scale, accumulate)
    # The gradients of checkpointed micro-batches are added to ``.grad`` one by one, in another order of summation.
    close = 0.0 if checkpoint == "never" or accumulate == 1 else 1e-5
    for what in ("losses", "norms"):
        assert actual[what] == pytest.approx(expected[what], rel=close, abs=0, nan_ok=True)
    assert (actual["rates"], actual["scales"]) == (expected["rates"], expected["scales"])
    torch.testing.assert_close(actual["parameters"], expected["parameters"], rtol=close, atol=close)
    overflowed = not all(norm < float("inf") for norm in actual["norms"])
    assert overflowed == (scale == 2.0**19)
    assert any(after < before for before, after in pairwise(actual["scales"])) == overflowed


@pytest.mark.parametrize("schedule", ["backward", "1F1B", "ZeroBubble"])
def test_optimizers_that_step_in_hooks(devices: Devices, schedule: str) -> None:
    """Each parameter's optimizer steps when the gradient of the mini-batch is there, and frees the gradient."""
    options: dict[str, Any] = {"devices": devices(3), "chunks": CHUNKS, "loss_fn": F.cross_entropy}
    options |= {"schedule": schedule} if schedule != "backward" else {}
    model, other = (GPipe(make_layers(), BALANCE, **options) for _ in range(2))

    def step(model: GPipe, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = F.cross_entropy(model(x), y) if schedule == "backward" else model.step(x, y)
        if schedule == "backward":
            loss.backward()
        return loss.detach()

    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    adam = torch.optim.Adam(other.parameters())
    for [(x, y)] in batches(3):
        loss = step(other, x, y)
        adam.step()
        adam.zero_grad()
        assert torch.equal(step(model, x, y), loss)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


@needs_accelerator
@pytest.mark.parametrize("scale", [0.0, 2.0**10])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_gpu_and_the_cpu_in_one_optimizer(options: dict[str, bool], scale: float) -> None:
    """The norm is one number over the parameters of both devices; each parameter is unscaled and updated in place.

    A scaler is tried on two accelerators, or one: it does not wait for what it copies from an accelerator to the CPU.
    """
    devices, kind = ([DEVICE, "cpu"], "cpu") if not scale else ([DEVICE, DEVICE], KIND)
    plain, layers = make_layers().double(), make_layers().double()
    model = GPipe(layers, [3, 3], devices=devices, chunks=CHUNKS)
    optimizers = [AdamW(net.parameters(), lr=0.01, **options) for net in (plain, model)]
    for [(x, y)] in batches(4):
        norms = []
        for net, optimizer in zip((plain, model), optimizers):
            scaler = torch.amp.GradScaler(kind if net is model else "cpu", init_scale=scale or 1.0, enabled=scale > 0)
            output = net(x.double())
            scaler.scale(F.cross_entropy(output, y.to(output.device))).backward()
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(net.parameters(), 0.1))
            scaler.step(optimizer)
            optimizer.zero_grad()
        torch.testing.assert_close(norms[1].cpu(), norms[0])
    for actual, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(actual.cpu(), expected)
