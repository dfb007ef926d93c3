"""Weights in host memory on a simulated GPU: copies cannot hide better than they should."""

from __future__ import annotations

import pytest

from benchmarks import offload


@pytest.mark.late
def test_copies_hide_behind_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.GPTBlock, "width", 64)
    slow = {"flops": 1e10, "bandwidth": 1e9, "link": 1e8}  # The host is not the limit.
    monkeypatch.setattr(offload, "CARD", slow)
    row = offload.measured(blocks=4, rows=1, chunks=4, turns=1)
    assert row["weights on the device over the slots"] == 1
    assert row["of what should"]["median"] < 1.1
    assert [one["met"] for one in offload.aims([row])][1]
    assert "step, ms" in offload.offload({"rows": [row]})
