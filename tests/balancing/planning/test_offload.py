"""Plans for weights in host memory fit, move what they say, and tell from which mini-batch on copies hide."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe
from tests.balancing.planning.models import Residual, mean, mlp
from torchgpipe.front.pipelined import runs_of
from torchgpipe_balancing.planning import offload
from torchgpipe_balancing.planning.costs import Costs, LayerCosts
from torchgpipe_balancing.planning.offload import OffloadPlan
from torchgpipe_balancing.planning.plan import DoesNotFit
from torchgpipe_balancing.planning.problem import CellCosts, Layer

WIDTH, LAYERS = 16, 6


def planned(model: nn.Module, memory: Any, **options: Any) -> OffloadPlan:
    options = {"batch": 8, "loss_fn": mean, "offload": True, **options}
    devices = [f"cpu:{k}" for k in range(len(memory))]
    return torchgpipe.plan(model, torch.randn(2, WIDTH), memory=memory, devices=devices, **options)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("make", [mlp, Residual])
def test_a_plan_fits_and_moves_what_it_says(make: Any, n: int) -> None:
    plan = planned(make(LAYERS, WIDTH), ["8KiB"] * n, bandwidth=1e8)
    assert all(size <= 0.9 * 8 * 1024 for size in plan.memory)
    model = plan.apply(make(LAYERS, WIDTH))
    memory = model._host_memory if make is mlp else runs_of(model).host_memory  # type: ignore[union-attr]
    before = memory.bytes_up, memory.bytes_down
    model.step(torch.randn(8, WIDTH))
    moved = memory.bytes_up - before[0], memory.bytes_down - before[1]
    assert (tuple(memory.slots.values()), *moved) == (plan.slots, plan.bytes_up, plan.bytes_down)
    assert re.search(r"partitions, \d slots.*\n.*up and .* down.*\n.*hide behind computing.*\n.*rows a step", str(plan))


def test_what_does_not_fit_would_with_the_memory_that_is_told() -> None:
    with pytest.raises(DoesNotFit, match=r"it would fit with (\d+\.\d) KiB on each device") as raised:
        planned(Residual(LAYERS, WIDTH), [1000], bandwidth=1e8)
    size = float(re.findall(r"([\d.]+) KiB", str(raised.value))[0]) + 0.1
    assert planned(Residual(LAYERS, WIDTH), [f"{size} KiB"], bandwidth=1e8).chunks
    with pytest.raises(ValueError, match="load it on the CPU"):
        planned(Residual(LAYERS, WIDTH).to("meta"), [1e6])


def test_copies_hide_from_as_many_rows_on_as_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With w bytes a parameter, b bytes a second and F FLOP a second: b F / 2 w forward, b F / 6 w backward."""
    parameters, flops, speed = 1000, 1e6, 1e3
    took = Layer(forward=2 * parameters / flops, backward=4 * parameters / flops, kept=0.1)  # for a row
    layer = LayerCosts(("a",), 2 * parameters, 0, 0, (took,))
    costs = Costs((layer,) * LAYERS, (1,), (CellCosts(),), 0.0, 0.0, "", "")
    monkeypatch.setattr(offload, "_measured", lambda *_: (costs, [1.0]))
    few, many = (planned(Residual(LAYERS, WIDTH), [1e9], bandwidth=speed, batch=rows, chunks=4) for rows in (8, 8000))
    tight = planned(Residual(LAYERS, WIDTH), [3 * 2 * parameters], bandwidth=speed, batch=8000, chunks=4)
    assert tight.recomputes
    assert tight.rows_to_hide == pytest.approx((flops / speed, flops / speed / 3))
    assert few.waited > many.waited
    assert many.waited == pytest.approx(2 * parameters / speed * many.balance[0], rel=0.01)


def test_the_bandwidth_is_measured() -> None:
    assert planned(Residual(LAYERS, WIDTH), [1e9], chunks=2).bandwidth > 1e6
