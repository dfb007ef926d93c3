"""Random programs give over processes what they give in one, or are refused in both; see `random_programs`."""

from __future__ import annotations

import pytest

from tests.distributed.launch import launch
from tests.distributed.random_programs import draw, try_in_this_process
from tests.front.programs import HARMLESS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("n", [2, 3])
def test_random_programs(n: int) -> None:
    trials = [draw(seed) for seed in range(60)]
    harmless = [trial for trial in trials if all([name in HARMLESS for name, _ in trial.moves])]  # The rest takes long.
    seeds = [trial.seed for trial in harmless if trial.processes == n][:5]
    for told in launch(n, try_in_this_process, seeds):
        wrong = [text for text in told if text and (not text.startswith("one process: ") or "accepted" in text)]
        assert not wrong
