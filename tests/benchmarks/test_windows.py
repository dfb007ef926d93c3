"""Windows on simulated GPUs: no step is quicker than on paper."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import offload, windows


@pytest.mark.late
def test_no_window_is_quicker_than_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.GPTBlock, "width", 64)
    slow = {"flops": 1e8, "bandwidth": 1e8, "link": 1e9}  # The host is not the limit.
    monkeypatch.setattr(windows, "CARD", slow)
    monkeypatch.setattr(windows, "SCHEDULES", ("1F1B",))
    monkeypatch.setattr(windows, "LENGTHS", {"web": windows.LENGTHS["web"]})
    args = Namespace(partitions=[2], micro_batches=[3], tokens=16, turns=1)
    given, unequal = windows.given(args), windows.unequal(args)
    (row,) = unequal["rows"]
    assert all(one[way]["median"] < 1.1 for one in given["rows"] for way in ("split", "given"))
    assert all(row[f"{way}, on paper"] < 1.1 * row[way]["median"] for way in ("as they come", "longest"))
    assert "| pipelined " in windows.window_given(given)
    assert "| web " in windows.window_unequal(unequal)
