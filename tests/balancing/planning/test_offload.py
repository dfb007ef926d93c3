"""Plans for weights in host memory fit, and move what they say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe
from tests.balancing.planning.models import Residual, mean, mlp
from tests.offload.transfers import counted, transfers_of
from torchgpipe.front.pipelined import runs_of
from torchgpipe_balancing.planning.offload import OffloadPlan
from torchgpipe_balancing.planning.plan import DoesNotFit

WIDTH, LAYERS = 16, 6


def planned(model: nn.Module, memory: Any, **options: Any) -> OffloadPlan:
    options = {"batch": 8, "loss_fn": mean, "offload": True, **options}
    devices = [f"cpu:{k}" for k in range(len(memory))]
    return torchgpipe.plan(model, torch.randn(2, WIDTH), memory=memory, devices=devices, **options)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("make", [mlp, Residual])
def test_a_plan_fits_and_moves_what_it_says(make: Any, n: int) -> None:
    plan = planned(make(LAYERS, WIDTH), ["8KiB"] * n)
    assert all(size <= 0.9 * 8 * 1024 for size in plan.memory)
    model = plan.apply(make(LAYERS, WIDTH))
    memory = model._host_memory if make is mlp else runs_of(model).host_memory  # type: ignore[union-attr]
    with counted():
        model.step(torch.randn(8, WIDTH))
    moved = transfers_of(memory)
    assert {*memory.slots.values()} == {2}
    assert (moved.bytes_up, moved.bytes_down) == (plan.bytes_up, plan.bytes_down)
    assert re.search(r"partitions, 2 slots.*\n.*up and .* down\nneeds .*", str(plan))


def test_what_does_not_fit_would_with_the_memory_that_is_told() -> None:
    with pytest.raises(DoesNotFit, match=r"it would fit with (\d+\.\d) KiB on each device") as raised:
        planned(Residual(LAYERS, WIDTH), [1000])
    size = float(re.findall(r"([\d.]+) KiB", str(raised.value))[0]) + 0.1
    assert planned(Residual(LAYERS, WIDTH), [f"{size} KiB"]).chunks


def test_layers_are_recomputed_only_if_they_do_not_fit_otherwise() -> None:
    much, little = (planned(mlp(LAYERS, WIDTH), [size], chunks=4) for size in ("1MiB", "9KiB"))
    assert not much.recomputes and little.recomputes
    assert len(much.balance) < len(little.balance)
    assert not planned(mlp(LAYERS, WIDTH), ["1MiB"], checkpoint=False).recomputes
