"""Find the best split: first the smallest largest load, then the least sum of squared loads.

One recurrence answers both questions. It adds the partitions from the last to the first::

    least[j][start]  =  min over end of  join(load(j, start, end), least[j + 1][end])

For the first question `join` takes the larger of the two. For the second it adds the square of the load, and no load
may exceed the answer to the first question.

Cut i lies before layer i; a split is the list of its cuts, from 0 to the number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import numpy as np

__all__ = ["best_split", "sums_between"]

#: The share of a load that sums of floats may be off: a load exceeds a bound if it is larger by more.
_ROUNDING = 1e-12


def sums_between(values: Sequence[float]) -> Any:
    """Return a matrix of the sums from one cut, the row, to another, the column."""
    sums = np.array(list(accumulate(values, initial=0.0)))
    return sums - sums[:, None]


def best_split(
    costs: Sequence[float], slowness: Sequence[float], fits: Sequence[Any] | None = None
) -> list[int] | None:
    """Return the cuts of the best split, or None if no split keeps the limits.

    Args:
        costs: the cost of each layer
        slowness: for each partition, the factor that turns the costs of its layers into its load
        fits: for each partition, a matrix of whether it may have the layers from one cut to another (default: any)
    """
    unit = max(costs) or 1.0  # Squares of numbers of any magnitude stay finite.
    loads = sums_between([cost / unit for cost in costs])
    loads[np.tril_indices_from(loads)] = inf  # No partition is empty.
    spare = len(costs) - len(slowness)  # Partition j begins at one of the cuts j to j + spare.
    cuts, bound = None, inf
    for join in (np.maximum, lambda load, rest: load * load + rest):
        rest, ends = np.full(spare + 1, inf), list[Any]()
        rest[-1] = 0.0
        for j in reversed(range(len(slowness))):
            starts, stops = slice(j, j + spare + 1), slice(j + 1, j + spare + 2)
            load = loads[starts, stops] * slowness[j]
            joined = join(load, rest)
            joined[load > bound] = inf
            if fits is not None:
                joined[~fits[j][starts, stops]] = inf
            ends.insert(0, joined.argmin(axis=1))
            rest = joined.min(axis=1)
        if rest[0] == inf:
            return None
        begun = accumulate(ends, lambda after, of_cut: int(of_cut[after]), initial=0)  # counted from cut j
        cuts = [j + after for j, after in enumerate(begun)]
        spans = zip(pairwise(cuts), slowness)
        bound = max([loads[start, end] * factor for (start, end), factor in spans]) * (1 + _ROUNDING)
    return cuts
