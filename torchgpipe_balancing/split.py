"""Find the best split: first the smallest largest load, then the least sum of squared loads.

One recurrence answers both questions. It adds the partitions from the last to the first::

    least[j][start]  =  min over end of  join(load(j, start, end), least[j + 1][end])

For the first question `join` takes the larger of the two. For the second it adds the square of the load, and no load
may exceed the answer to the first question.

A bound on the loads leaves few cuts to compare: partitions filled from the left reach as far right as any split, and
filled from the right, as far left. Such a bound is found beforehand by bisection, with splits that are filled from the
left. It need not be the least one: the first question is still answered by the recurrence.

Cut i lies before layer i; a split is the list of its cuts, from 0 to the number of layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Any, TypeAlias

import numpy as np

__all__ = ["best_split"]

#: Joins the loads of a partition and what the later partitions join to.
Join: TypeAlias = Callable[[Any, Any], Any]

#: The share of a load that sums of floats may be off: a load exceeds a bound if it is larger by more.
_ROUNDING = 1e-12


def best_split(
    costs: Sequence[float], slowness: Sequence[float], farthest: Callable[[int, int], int] | None = None
) -> list[int] | None:
    """Return the cuts of the best split, or None if no split keeps the limits.

    Args:
        costs: the cost of each layer
        slowness: for each partition, the factor that turns the costs of its layers into its load
        farthest: returns the farthest cut where a partition may end, given its number and the cut where it starts,
            which is the answer if no layer fits; for starts further right it is no further left (default: no limits)
    """
    unit = max(costs) or 1.0  # Squares of numbers of any magnitude stay finite.
    split = _Split([cost / unit for cost in costs], slowness, farthest)
    cuts = split.least(np.maximum, split.loose_bound())
    return None if cuts is None else split.least(lambda load, rest: load * load + rest, split.largest_load(cuts))


class _Split:
    """Layers in a row, by the sum of their costs before each cut, and devices to spread them over."""

    def __init__(
        self, costs: Sequence[float], slowness: Sequence[float], farthest: Callable[[int, int], int] | None
    ) -> None:
        self._sums = list(accumulate(costs, initial=0.0))
        self._layers, self._n = len(costs), len(slowness)
        self._slowness, self._farthest = slowness, farthest

    def largest_load(self, cuts: Sequence[int]) -> float:
        """Return the largest load of a split."""
        spans = zip(pairwise(cuts), self._slowness)
        return max([(self._sums[end] - self._sums[start]) * factor for (start, end), factor in spans])

    def loose_bound(self) -> float:
        """Return a bound that some split keeps, near the least one; or one that all splits keep, if none is found."""
        low, high = 0.0, self._sums[-1] * max(self._slowness)
        while high - low > high / 2**16:
            middle = (low + high) / 2
            cuts = self._latest_cuts(middle)
            if cuts[-1] == self._layers and all(start < end for start, end in pairwise(cuts)):
                high = min(middle, self.largest_load(cuts))
            else:
                low = middle
        return high

    def least(self, join: Join, bound: float) -> list[int] | None:
        """Return the cuts of the split whose joined loads are least, or None if no split keeps the bound.

        Args:
            join: joins loads
            bound: the largest load
        """
        sums, rest = np.array(self._sums), np.full(self._layers + 1, inf)
        rest[-1] = 0.0
        earliest, latest = self._earliest_cuts(bound), self._latest_cuts(bound)
        best_ends: list[dict[int, int]] = []
        for j in reversed(range(self._n)):
            least = np.full(self._layers + 1, inf)
            best_ends.insert(0, {})
            for start in range(earliest[j], latest[j] + 1):
                first, last = max(earliest[j + 1], start + 1), min(latest[j + 1], self._farthest_end(j, start, bound))
                if first <= last:
                    ends = slice(first, last + 1)
                    joined = join((sums[ends] - sums[start]) * self._slowness[j], rest[ends])
                    best_ends[0][start] = first + int(joined.argmin())
                    least[start] = joined.min()
            rest = least
        return None if rest[0] == inf else list(accumulate(best_ends, lambda cut, ends: ends[cut], initial=0))

    def _latest_cuts(self, bound: float) -> list[int]:
        """Return cuts that lie at least as far right as those of all splits within a bound."""
        cuts = [0]
        for j in range(self._n):
            # Each partition after this one needs a layer.
            cuts.append(min(self._farthest_end(j, cuts[j], bound), self._layers - (self._n - 1 - j)))
        return cuts

    def _earliest_cuts(self, bound: float) -> list[int]:
        """Return cuts that lie at least as far left as those of all splits within a bound."""
        cuts = [self._layers]
        for j in reversed(range(self._n)):
            # Each partition before this one needs a layer.
            starts = range(j, self._layers + 1)
            cuts.insert(0, j + bisect_left(starts, cuts[0], key=lambda start: self._farthest_end(j, start, bound)))
        return cuts

    def _farthest_end(self, j: int, start: int, bound: float) -> int:
        """Return the last cut where partition j may end, by its limit and by a bound on its load."""
        room = bound * (1 + _ROUNDING) / self._slowness[j]
        end = bisect_right(self._sums, self._sums[start] + room) - 1
        return end if self._farthest is None else min(end, self._farthest(j, start))
