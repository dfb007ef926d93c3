"""Mixed precision and gradient accumulation: the documented training loop, with a pipeline and without.

Both are equal to the last bit, including steps that are skipped because a gradient overflows.
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
from tests.practice.training import BALANCE, CHUNKS, batches, make_layers

Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class History:
    """The events of each step, and the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


def train(
    layers: nn.Sequential, run: Callable[[Tensor], Tensor], autocast: Context, scale: float = 0.0, accumulate: int = 1
) -> History:
    """Run a training loop as users write it.

    Args:
        layers: the layers to train
        run: the model to call
        autocast: the context around the model and the loss
        scale: the first scale of the loss; 0 for no scaling
        accumulate: the number of mini-batches in a step
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
@pytest.mark.parametrize(
    ("dtype", "scale", "accumulate"),
    [(None, 0.0, 3), (torch.bfloat16, 0.0, 1), (torch.float16, 2.0**10, 3), (torch.float16, 2.0**19, 1)],
)
def test_training_is_that_of_the_plain_model(
    pipe: Pipe, checkpoint: str, dtype: torch.dtype | None, scale: float, accumulate: int
) -> None:
    autocast: Context = nullcontext if dtype is None else partial(torch.autocast, "cpu", dtype)
    plain = make_layers()
    layers = copy.deepcopy(plain)
    model = pipe(layers, BALANCE, chunks=CHUNKS, checkpoint=checkpoint)
    # A checkpointed micro-batch casts its own weights; the others share those in autocast's cache.
    within, each = (autocast, nullcontext) if checkpoint == "never" else (nullcontext, autocast)
    expected = train(plain, partial(run_plain, plain, chunks=CHUNKS, each=each), within, scale, accumulate)
    actual = train(layers, model, autocast, scale, accumulate)

    # The gradients of checkpointed micro-batches are added to ``.grad`` one by one, in another order of summation.
    tolerance = 0.0 if checkpoint == "never" or accumulate == 1 else 1e-5
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance, abs=0)
    assert actual.norms == pytest.approx(expected.norms, rel=tolerance, abs=0, nan_ok=True)
    assert actual.scales == expected.scales
    torch.testing.assert_close(actual.parameters, expected.parameters, rtol=tolerance, atol=tolerance)

    overflowed = not all(norm < float("inf") for norm in actual.norms)
    assert overflowed == (scale == 2.0**19)
    assert any(after < before for before, after in pairwise([scale, *actual.scales])) == overflowed
