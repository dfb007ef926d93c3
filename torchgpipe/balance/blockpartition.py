"""Split a list of costs into blocks; torchgpipe 0.0.5 to 0.0.7 had this function here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torchgpipe_balancing.partition import partition

__all__ = ["solve"]


def solve(sequence: Sequence[int], partitions: int = 1) -> list[list[int]]:
    """Split costs into consecutive blocks, as :func:`torchgpipe_balancing.partition` does.

    Args:
        sequence: the cost of each layer
        partitions: the number of blocks

    Returns:
        The costs in each block.

    Raises:
        ValueError: there are fewer costs than partitions, or ``partitions`` is below 1.
    """
    counts = partition(sequence, partitions)
    return [[*sequence[end - count : end]] for count, end in zip(counts, accumulate(counts))]
