"""A plan for a window of micro-batches that differ: each has its own times and bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.balancing.planning.models import DEVICES, WIDTH, Residual, mlp, quick
from torchgpipe import MicroBatches
from torchgpipe_balancing import Plan
from torchgpipe_balancing.planning.candidates import PlanInput, problem_of
from torchgpipe_balancing.planning.costs import Costs, LayerCosts
from torchgpipe_balancing.planning.problem import CellCosts, Choice, Device, Layer

ROWS = [1, 9, 4, 6, 2]


def window(order: Any = None) -> MicroBatches:
    return MicroBatches([torch.randn(rows, WIDTH) for rows in ROWS], order=order)


def planned(model: nn.Module, sample: Any, **options: Any) -> Plan:
    return quick(model, sample, chunks=None, **options)


def test_each_micro_batch_takes_the_time_and_the_memory_of_its_length() -> None:
    """Two layers that take a second and a byte for each element; so do copies between them."""
    layer = LayerCosts(("a",), 0, 0, 0, (Layer(forward=1.0, backward=2.0, kept=1.0, crossing=1.0),))
    costs = Costs((layer, layer), (1,), (CellCosts(),), 0.0, per_byte=1.0, where="cpu", loss="")
    devices = tuple(map(Device, DEVICES))
    given = PlanInput(costs, devices, batch=4, states=0.0, schedules=("GPipe",), chunks=(2,), lengths=(1, 3))
    outcome = problem_of(given, "GPipe", 2).outcome(Choice((1, 1)))
    #    0  1     4                  20     23
    # 0  F0 F1    .  .  .  .         b1 ...
    # 1  .  .  F0 .  .  .  .  F1 b1 ... b0
    starts = [{str(action): start for action, start in row} for row in outcome.simulation.starts]
    assert starts[0] == {"F(0,0)": 0, "F(1,0)": 1, "B(1,0)": 19, "B(0,0)": 25}
    assert starts[1] == {"F(0,1)": 2, "F(1,1)": 7, "B(1,1)": 10, "B(0,1)": 16}
    assert outcome.memory == [4, 4]


@pytest.mark.parametrize("model", [mlp(), Residual()], ids=["layers", "any module"])
@pytest.mark.parametrize("order", [None, "longest"])
def test_what_is_predicted_is_held(model: nn.Module, order: Any) -> None:
    plan = planned(copy.deepcopy(model).to("meta"), torch.zeros(2, WIDTH), batch=window(order), checkpoint=False)
    check = plan.check(model, steps=1)
    assert check.predicted_bytes == pytest.approx(check.measured_bytes)


def test_a_list_of_lengths_is_planned_from_micro_batches_of_some_lengths(tmp_path: Path) -> None:
    model = mlp()
    plan = planned(
        model, window(), batch=[WIDTH * rows for rows in (3, 3, 12, 5)], trials=2, schedule=("GPipe", "1F1B")
    )
    assert plan.input.costs.rows == (WIDTH, 4 * WIDTH, 9 * WIDTH)
    assert str(plan).startswith("4 micro-batches of 24 to 96 on 2 devices: schedule=")
    assert "with micro-batches of 8, 32 and 72 elements" in str(plan).replace("\n  ", " ")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    pipeline = plan.apply(model, loss_fn=lambda output, _: output.mean())
    assert pipeline.step(window()).isfinite()
