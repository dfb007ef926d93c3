"""The benchmark of plans runs from its arguments to its tables, at meaninglessly small sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")

from benchmarks import plan, plan_choice, plan_models, plan_prediction, plan_search, plan_splits
from tests.benchmarks.test_benchmarks import run_parts

pytestmark = pytest.mark.slow

TINY = "--seeds 1 --shrink 100000 --measure 0 --turns 1 --steps 1 --rounds 1 --tables 5 --search 8 2"


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the threads of this process, which answers in place of a child."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def test_parts_are_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_prediction, "FAMILIES", ("mlp",))
    tiny = nn.Sequential(*[nn.Linear(8, 8) for _ in range(plan_choice.LAYERS)])
    monkeypatch.setitem(plan_models.FAMILIES, "mlp", lambda random: (tiny, torch.randn(4, 8)))
    monkeypatch.setattr(plan_prediction, "LIMITED", 1)
    monkeypatch.setattr(plan_choice, "MODELS", plan_choice.MODELS[:1])
    monkeypatch.setattr(plan_choice, "CHUNKS", (4,))
    monkeypatch.setattr(plan_choice, "SCHEDULES", ("1F1B",))
    monkeypatch.setattr(plan_search, "SHARES", (0.9,))
    monkeypatch.setattr(plan_splits, "by_original", lambda tables, limit: [None] * len(tables))
    run_parts("plan", TINY, monkeypatch, tmp_path, "--only", "search", "choice")
    result = run_parts("plan", TINY, monkeypatch, tmp_path, "--only", "splits", "prediction")
    parts = result["parts"]
    assert {*parts} == {*plan.PARTS}
    assert all(part.show(parts[name])["what was aimed at"] for name, part in plan.PARTS.items() if name != "search")
    (row,) = parts["prediction"]["rows"]
    assert row["limit"] in (None, *plan_prediction.SHARES)
    assert sum(row["turns"][0]["choice"]["balance"]) == row["layers"]
    (row,) = parts["choice"]["rows"]
    assert row["ways"] == 5 and row["planned"] in row["seconds"]
    told = capsys.readouterr().out
    assert "| predicted / measured step, off 1 in the median " in told
    assert "| planned way over the best of all, beyond the noise, " in told


@pytest.mark.parametrize("family", plan_models.FAMILIES)
def test_a_seed_makes_the_same_model(family: str) -> None:
    first, second = (plan_models.plan_model(family, 3) for _ in range(2))
    assert str(first.model) == str(second.model)
    assert (first.name, first.batch) == (second.name, second.batch)
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    assert plan_models.mean_of_squares(first.model(first.sample)).isfinite()


def test_aims_name_the_models_that_are_far_off() -> None:
    def row(name: str, predicted: float, counted: float) -> dict[str, Any]:
        turn = {"layers": 3, "batch": 8, "predicted": predicted, "measured": 1.0}
        turn |= {"predicted_bytes": [100.0, 0.0], "measured_bytes": [counted, 0.0]}
        return plan_prediction.row({"family": name, "seed": 0}, {}, [turn])

    rows = [row("a", 1.05, 100.0), row("b", 0.75, 80.0), row("c", 0.95, 100.0)]
    found = plan_prediction.summary(rows)
    assert found["beyond"] == ["b 0"]
    assert [round(aim["reached"], 9) for aim in found["aims"]] == [0.05, 2, 2]
    assert [aim["met"] for aim in found["aims"]] == [True, False, False]
    rows[1]["limit"] = 0.6
    limited = plan_prediction.summary(rows)["aims"][2:]
    assert [(round(aim["reached"], 9), aim["met"]) for aim in limited] == [(2, True), (0.25, False)]


def test_the_noise_is_between_two_runs_of_the_planned_way() -> None:
    seconds = {"a": [1.1, 1.1], "b": [1.0, 1.0], "c": [2.0, 2.0], plan_choice.AGAIN: [1.0, 1.2]}
    answer = {"batch": 8, "planned": "a", "predicted": {"a": 1.0, "b": 1.0, "c": 1.0}, "seconds": seconds}
    row = plan_choice.row({"family": "mlp", "seed": 0}, answer)
    assert (row["best"], row["rank"], row["ways"]) == ("b", 2, 3)
    assert row["chosen/best"] == pytest.approx(1.1) and row["noise"] == pytest.approx(0)
