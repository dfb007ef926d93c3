"""The schedule, cell by cell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.schedule import clock_cycles


def test_the_picture_of_a_pipeline() -> None:
    assert list(clock_cycles(4, 2)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1)],
        [(3, 0), (2, 1)],
        [        (3, 1)],
    ]  # fmt: skip


@given(m=st.integers(1, 12), n=st.integers(1, 12))
def test_every_cell_runs_once_at_clock_i_plus_j(m: int, n: int) -> None:
    clocks = list(clock_cycles(m, n))
    assert len(clocks) == m + n - 1
    for clock, cells in enumerate(clocks):
        assert all(i + j == clock for i, j in cells)
        assert [j for _, j in cells] == sorted({j for _, j in cells}), "in the order of their partitions, each once"
    assert sorted(cell for cells in clocks for cell in cells) == [(i, j) for i in range(m) for j in range(n)]
