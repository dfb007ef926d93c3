"""Plans take the programs that are fastest at the measured times, and say what that gains, and what is left to gain."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import torchgpipe
from tests.balancing.planning.models import mean
from torchgpipe.schedule import verify
from torchgpipe_balancing.planning.candidates import Candidate, PlanInput, candidates, fitted, least_seconds, problem_of
from torchgpipe_balancing.planning.check import config_of
from torchgpipe_balancing.planning.costs import Costs, LayerCosts
from torchgpipe_balancing.planning.problem import CellCosts, Device, Layer
from torchgpipe_balancing.planning.result import Plan


def question(memory: float, slowness: float = 1.0) -> PlanInput:
    """Return what to plan for: layers whose times differ, on four devices, of which the last is slower."""
    rows = [
        Layer(
            forward=(4 + k % 3) * 1e-3,
            backward=9e-3,
            inputs=6e-3,
            weights=3e-3,
            kept=100.0,
            waiting=10.0,
            crossing=50.0,
        )
        for k in range(16)
    ]
    layers = tuple(LayerCosts((f"{k}",), 10, 10, 0, (row,)) for k, row in enumerate(rows))
    costs = Costs(layers, (1,), (CellCosts(),), 1e-4, 1e-6, "cpu:0", "")
    devices = tuple(Device(f"cpu:{k}", memory, slowness if k == 3 else 1.0) for k in range(4))
    return PlanInput(costs, devices, batch=16, states=1.0, chunks=(16,), recomputes=False)


@pytest.mark.parametrize(("memory", "slowness"), [(float("inf"), 1.0), (2000.0, 1.0), (1500.0, 1.3)])
def test_the_fastest_program_fits_and_is_between_the_bound_and_1f1b(memory: float, slowness: float) -> None:
    given = question(memory, slowness)
    named = candidates(given)
    best = fitted(given, named)[0]
    assert best.fitted is not None
    assert best.seconds < named[0].seconds
    assert max(best.memory) <= memory
    verify(problem_of(given, best).program, 16, best.places)
    assert problem_of(given, best).outcome(best.choice).seconds == pytest.approx(best.seconds)
    assert least_seconds(given, best) <= best.seconds * (1 + 1e-9)
    usual = candidates(replace(given, schedules=("1F1B",)))
    assert not usual or best.seconds < 0.95 * usual[0].seconds


def test_programs_of_four_rounds_are_tried() -> None:
    assert {len(one.places) for one in candidates(question(float("inf")))} == {4, 8, 16}


def test_a_plan_says_what_it_gains_and_its_program_runs() -> None:
    given = question(float("inf"))
    best = fitted(given, candidates(given))[0]
    usual = candidates(replace(given, schedules=("1F1B",)))[0]
    plan = Plan(given, (best,), torch.randn(2, 8), usual, options={"loss_fn": mean})
    assert f"1F1B would take {usual.seconds / best.seconds:.2f} times as long" in " ".join(str(plan).split())
    assert "no other program with these partitions is quicker by more than" in " ".join(str(plan).split())
    assert 0 < plan.least_seconds <= plan.seconds
    assert pickle.loads(pickle.dumps(best.fitted))(16, best.places) == problem_of(given, best).program
    assert callable(config_of(given, best).schedule)
    model = plan.apply(nn.Sequential(*[nn.Linear(8, 8) for _ in range(16)]))
    assert isinstance(model, torchgpipe.GPipe)
    for rows in (16, 5):  # A last mini-batch is smaller.
        model.step(torch.randn(rows, 8), torch.randn(rows, 8))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_written_programs_stay_as_they_are() -> None:
    given = replace(question(float("inf")), schedules=("GPipe",))
    assert all(isinstance(one, Candidate) and one.fitted is None for one in fitted(given, candidates(given)))


def test_an_output_that_gives_no_loss_is_refused() -> None:
    class Nothing(nn.Linear):
        def forward(self, input: torch.Tensor) -> None: ...  # type: ignore[override]

    model = nn.Sequential(nn.Linear(4, 4), Nothing(4, 4))
    with pytest.raises(ValueError, match=r"has no tensor of floating point to take for a loss; give loss_fn="):
        torchgpipe.plan(model, torch.randn(4, 4), batch=8, devices=["cpu:0", "cpu:1"], seconds=0)
