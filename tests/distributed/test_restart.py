"""A run that is started again after a process was killed has the losses of an uninterrupted run.

`benchmarks.campaigns.faults` tries it with torchrun, for every kind of harm; here, the processes are started twice.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.campaigns.faults import lines, tells
from benchmarks.campaigns.interrupted import Harm, note, train
from tests.distributed.launch import launch, needs_stages

pytestmark = [pytest.mark.slow, needs_stages]


def train_with(folder: str, harm: Harm) -> None:
    try:
        train(Path(folder), harm)
    except RuntimeError as error:
        note(Path(folder, "errors"), error=str(error))
        raise


def losses(folder: Path) -> list[float]:
    """Return the losses of the last run of each step."""
    found = {line["step"]: line["loss"] for line in lines(folder / "steps")}
    return [loss for _, loss in sorted(found.items())]


def test_a_run_that_is_started_again_has_the_losses_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole, harmed = (str(tmp_path / name) for name in ("whole", "harmed"))
    for folder in (whole, harmed):
        Path(folder).mkdir()
    launch(2, train_with, whole, Harm("none"))
    with suppress(AssertionError):  # The process that is left raises.
        launch(2, train_with, harmed, Harm("kill", "layer", rank=1, step=7), victim=1)
    (error,) = lines(Path(harmed, "errors"))
    assert tells(error, rank=0)
    launch(2, train_with, harmed, Harm("none"))
    assert sorted({line["begin"] for line in lines(Path(harmed, "steps"))}) == [0, 6]
    assert losses(Path(harmed)) == losses(Path(whole))
