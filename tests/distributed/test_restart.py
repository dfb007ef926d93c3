"""A run that torchrun restarts after a fault has the losses of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.campaigns.faults import lines, trial
from benchmarks.campaigns.interrupted import Harm, train
from tests.distributed.launch import launch, needs_stages

pytestmark = [pytest.mark.slow, needs_stages]


def train_without_harm(folder: str) -> None:
    train(Path(folder), Harm("none"))


@pytest.mark.timeout(240)
def test_a_run_that_is_started_again_has_the_losses_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    launch(2, train_without_harm, str(tmp_path))
    row = trial(2, Harm("kill", "layer", rank=1, step=7))
    assert row["ended"] and row["runs"] == 2
    assert row["resumed_at"] == 6
    assert row["losses"] == [line["loss"] for line in lines(tmp_path / "steps")]
    assert row["left_behind"] == 0
