"""The predictions of a report equal simulations with costs that are known."""

from __future__ import annotations

import pytest
import torch

import torchgpipe
from tests.conftest import Devices
from tests.timeline.synthetic import ideal, ran, rows, span
from tests.timeline.test_recorder import batch, gpipe
from torchgpipe.schedule import COSTS, NAMES, Action, ScheduleName, program, simulate
from torchgpipe.schedule.programs import usual_places
from torchgpipe.timeline.prediction import Prediction
from torchgpipe.timeline.report import Report
from torchgpipe.timeline.span import Span

M = 4


def by_name(report: Report) -> dict[str | None, Prediction]:
    return {one.schedule: one for one in report.schedules}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_goes_as_simulated_takes_the_time_of_its_program(name: ScheduleName) -> None:
    """Parts of a device are counted as parts of a micro-batch."""
    places = [0, 1, 0, 1] if name == "LayerMajor" else usual_places(name, 2)
    one = program(name, M, places)
    made = ran(one, [f"cpu:{place}" for place in places])
    simulated = simulate(one, memory=[1 / places.count(place) for place in places])
    (own,) = [one for one in made.schedules if one.ran]
    assert (own.schedule, own.seconds, own.live) == (name, made.duration, max(simulated.peaks))
    assert own.bubble == pytest.approx(made.bubble)
    assert made.predicted == pytest.approx(simulated.seconds)
    halves = {kind: cost / 2 for kind, cost in COSTS.items()}
    twice = simulate(program(name, 2 * M, places), halves).seconds
    assert made.more_chunks.gain == pytest.approx(1 - twice / simulated.seconds)
    assert made.better_balance.gain == pytest.approx(0)
    assert f"of the program {own.bubble * 100:.1f} %, simulated" in str(made)
    assert not made.take_turns, "each device has a worker of its own in a step"


def test_other_schedules_are_predicted_with_the_recorded_halves() -> None:
    devices, costs = ["cpu:0", "cpu:1", "cpu:2"], {"F": 1.0, "I": 1.5, "W": 0.5}
    made = ran(program("ZeroBubble", M, [0, 1, 2]), devices, costs)
    other = simulate(program("1F1B", M, [0, 1, 2]), {"F": 1.0, "B": 2.0, "I": 0.0, "W": 0.0})
    assert (by_name(made)["1F1B"].seconds, by_name(made)["1F1B"].bubble) == (other.seconds, other.bubble)
    assert "with other devices: Interleaved1F1B, V-Half" in str(made)
    assert "recorded whole" not in str(made)


def test_halves_that_were_not_recorded_are_equal() -> None:
    devices, costs = ["cuda:0", "cuda:1"], {"F": 1.0, "B": 3.0}
    one = program("1F1B", M, [0, 1])
    made = ran(one, devices, costs)
    expected = simulate(program("ZeroBubble", M, [0, 1]), {"F": 1.0, "B": 3.0, "I": 1.5, "W": 1.5})
    assert by_name(made)["ZeroBubble"].seconds == expected.seconds
    assert "either half of it is taken to need half of its time" in str(made)


def test_a_recomputed_cell_has_no_second_half() -> None:
    made = Report(ideal(M, 2), rows(2), {0: M}, {})
    expected = simulate(program("ZeroBubble", M, [0, 1]), {"F": 1.0, "B": 3.0, "I": 3.0, "W": 0.0})
    assert by_name(made)["ZeroBubble"].seconds == expected.seconds
    assert "the recorded cells and recomputations; copies" in str(made)


def test_forward_and_backward_are_told_what_a_step_would_take() -> None:
    made = Report(ideal(M, 3, again=0), rows(3), {0: M}, {})
    assert not any(one.ran for one in made.schedules)
    assert (by_name(made)["1F1B"].seconds, by_name(made)["1F1B"].live) == (made.duration, 3)
    assert by_name(made)["GPipe"].live == M
    assert "ideal" in str(made)


def test_interleaving_that_ran_is_named() -> None:
    """With one partition on each device there is nothing to interleave, but it may have run all the same."""
    made = ran(program("Interleaved1F1B", M, [0, 1]), ["cuda:0", "cuda:1"])
    assert [one.schedule for one in made.schedules if one.ran] == ["Interleaved1F1B"]


def test_a_program_of_your_own_is_compared_as_well() -> None:
    one = [[Action("F", 0, 0), Action("B", 0, 0)], [Action("F", 0, 1), Action("I", 0, 1), Action("W", 0, 1)]]
    costs = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    made = ran(one, ["cuda:0", "cuda:1"], costs)
    assert by_name(made)[None].ran
    assert by_name(made)[None].seconds == made.duration
    assert "your program, which ran" in str(made)


@pytest.mark.parametrize(
    "spans",
    [
        [span("forward", 0, 0, 0, 1)],
        [*ideal(M, 1), span("forward", 0, 0, 50, 51, step=1)],
        [*ideal(M, 1), *ideal(M - 1, 1, step=1)],
        [*ideal(M, 1), span("backward", 0, 0, 50, 51, failed=True)],
    ],
    ids=["no backward", "a step without backward", "steps of other sizes", "failed"],
)
def test_where_steps_cannot_be_compared_nothing_is_predicted(spans: list[Span]) -> None:
    made = Report(
        spans, rows(1), {0: M, 1: M - 1 if any(one.step and one.kind != "forward" for one in spans) else M}, {}
    )
    assert made.schedules == []
    assert "micro-batches\n" not in str(made).partition("to try")[0]


# What is recorded


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZeroBubble"])
def test_a_step_is_recorded_with_its_program(devices: Devices, schedule: ScheduleName) -> None:
    """Steps without gradients, and of different schedules, have none in common."""
    model, x = gpipe(devices(2), schedule=schedule), batch()

    def reported(*schedules: ScheduleName) -> Report:
        with torchgpipe.record(model) as timeline:
            for model.schedule in schedules:
                model.step(x, x)
        return timeline.report()

    report = reported(schedule, schedule)
    assert [one.schedule for one in report.schedules if one.ran] == [schedule]
    assert max(map(len, str(report).splitlines())) <= 100
    report = reported("GPipe", "1F1B")
    assert {one.schedule for one in report.schedules} >= {"GPipe", "1F1B"}
    assert not any(one.ran for one in report.schedules)
    with torch.no_grad():
        assert reported(schedule).schedules == []
