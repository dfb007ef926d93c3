"""The order in which cells run: a pure function of two numbers, with nothing of tensors or devices in it.

A cell (i, j) is micro-batch i on partition j. It needs (i, j-1), whose output it takes, and comes after
(i-1, j), which has the device before it. All cells with i + j = k can then run at the same time, clock k:

    clock  partition 0  partition 1  partition 2
      0       (0,0)
      1       (1,0)        (0,1)
      2       (2,0)        (1,1)        (0,2)
      3                    (2,1)        (1,2)
      4                                 (2,2)

The schedule is deterministic: who comes first never depends on which device happens to be faster.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["clock_cycles"]


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yields, clock by clock, the cells (i, j) that run side by side, in the order of their partitions.

    Args:
        m: number of micro-batches
        n: number of partitions
    """
    for clock in range(m + n - 1):
        first = max(0, clock - m + 1)  # partitions before it have seen every micro-batch
        last = min(clock, n - 1)  # partitions after it still wait for their first one
        yield [(clock - j, j) for j in range(first, last + 1)]
