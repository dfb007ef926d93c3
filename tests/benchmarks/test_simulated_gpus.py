"""Simulated GPUs: a step cannot be faster than the ideal, and what is told of it follows from what the streams did."""

from __future__ import annotations

import pytest

from benchmarks import offload, simulated_gpus
from benchmarks.simulated_gpus import Busy, GPTBlock, outcome
from tests.late import Interval


def test_what_is_told_follows_from_what_the_streams_did() -> None:
    did = [
        Interval(0, 0, "kernel", 1.0, 3.0),
        Interval(0, 0, "kernel", 4.0, 5.0),
        Interval(0, 1, "copy", 2.0, 4.0),
        Interval(1, 0, "kernel", 6.0, 9.0),
    ]
    told = outcome(did, start=0.0, host=1.0, n=2)
    assert told == {"seconds": 9.0, "host": 1.0, "bubble": pytest.approx(1 - 6 / 18), "in the shadow": 0.5}
    assert [Busy(did[:2]).until(time) for time in (0.5, 2.0, 3.5, 4.5, 7.0)] == [0.0, 1.0, 2.0, 2.5, 3.0]


@pytest.mark.late
@pytest.mark.parametrize("way", simulated_gpus.WAYS)
def test_a_row(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_gpus.MLPBlock, "width", 64)
    monkeypatch.setattr(simulated_gpus.GPTBlock, "width", 64)
    slow = {"flops": 1e12, "bandwidth": 1e9, "link": 1e9}  # The host is not the limit.
    monkeypatch.setitem(simulated_gpus.CARDS, "slow", slow)
    row = simulated_gpus.measured("MLP", "slow", 2, 50.0, "GPipe", way, turns=1)
    assert 0.5 < row["share"]["median"] <= 1.01
    assert row["ideal bubble"] <= row["bubble"]
    assert row["host over devices"]["median"] < 1


@pytest.mark.late
def test_copies_hide_behind_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPTBlock, "width", 64)
    slow = {"flops": 1e10, "bandwidth": 1e9, "link": 1e8}  # The host is not the limit.
    monkeypatch.setattr(offload, "CARD", slow)
    row = offload.measured(blocks=4, rows=1, chunks=4, turns=1)
    assert row["weights on the device over the slots"] == 1
    assert row["of what should"]["median"] < 1.1
    assert [one["met"] for one in offload.aims([row])][1]
    assert "step, ms" in offload.offload({"rows": [row]})
