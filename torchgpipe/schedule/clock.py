"""The order of cells in the paper of GPipe: a pure function of two numbers, without tensors or devices.

A cell (i, j) is micro-batch i on partition j. It needs the output of (i, j-1), and its device is busy with (i-1, j)
before. So all cells with i + j = k can run at the same time, clock k:

    clock  partition 0  partition 1  partition 2
      0       (0,0)
      1       (1,0)        (0,1)
      2       (2,0)        (1,1)        (0,2)
      3                    (2,1)        (1,2)
      4                                 (2,2)

The order is deterministic: it never depends on which device is faster.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["clock_cycles"]


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield for each clock the cells (i, j) that run side by side, in the order of their partitions.

    Args:
        m: number of micro-batches
        n: number of partitions
    """
    for clock in range(m + n - 1):
        first = max(0, clock - m + 1)  # earlier partitions have finished all micro-batches
        last = min(clock, n - 1)  # later partitions still wait for their first
        yield [(clock - j, j) for j in range(first, last + 1)]
