"""The split of a list of costs, where torchgpipe 0.0.5 to 0.0.7 had it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torchgpipe_balancing.partition import partition

__all__ = ["solve"]


def solve(sequence: Sequence[int], partitions: int = 1) -> list[list[int]]:
    """Split costs into consecutive blocks, as :func:`torchgpipe_balancing.partition` does.

    Args:
        sequence: what each layer costs
        partitions: how many blocks

    Returns:
        The costs in each block.

    Raises:
        ValueError: fewer costs than partitions, or partitions below 1.
    """
    counts = partition(sequence, partitions)
    return [[*sequence[end - count : end]] for count, end in zip(counts, accumulate(counts))]
