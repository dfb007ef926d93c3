"""PyTorch's own pipelines take part in the speed benchmark wherever they can train the model."""

from __future__ import annotations

import pytest

from benchmarks.peers import Request
from benchmarks.pytorch_pipelines import answer, refusal

pytestmark = pytest.mark.slow


def request(**changes: object) -> Request:
    about = {"size": "small", "model": "gpt-tiny", "batch": 4, "m": 2, "warm_up": 1, "steps": 2}
    return {**about, "units": [6, 5], "devices": ["cpu", "cpu"], **changes}


def test_a_process_for_each_partition_trains() -> None:
    seconds = answer("Schedule1F1B", request())["seconds"]
    assert len(seconds) == 2
    assert all(second > 0 for second in seconds)


@pytest.mark.parametrize(
    "peer, changes, reason",
    [
        ("ScheduleGPipe", {"units": None}, "skips"),
        ("Schedule1F1B", {"m": 1}, "fewer micro-batches than partitions"),
        ("ScheduleGPipe", {"m": 1}, None),
        ("ScheduleGPipe", {"devices": ["cuda:0", "cuda:0"]}, "fewer devices than partitions"),
        ("ScheduleGPipe", {"devices": ["cuda:0", "cuda:1"]}, None),
    ],
)
def test_pytorch_s_own_pipelines_report_what_they_cannot_train(
    peer: str, changes: dict[str, object], reason: str | None
) -> None:
    assert refusal(peer, request(**changes)) == reason
