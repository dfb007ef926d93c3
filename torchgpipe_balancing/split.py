"""Find the best split exactly: first the smallest largest load, then the least sum of squared loads.

One recurrence answers both questions. It adds the partitions from the last to the first::

    least[j][start]  =  min over end of  join(load(j, start, end), least[j + 1][end])

For the first question `join` takes the larger of the two. For the second it adds the square of the load, and no load
may exceed the answer to the first question.

No cost is negative. Hence the further right a partition starts, the further right its best end lies. After the best
end of the middle start is known, each half of the starts searches on its own side of that end only (Galil and Park,
"Dynamic programming with convexity, concavity and sparsity", 1992).

A bound on the loads leaves few cuts to compare: partitions filled from the left reach as far right as any split, and
filled from the right, as far left. Such a bound is found beforehand by bisection, with splits that are filled from the
left. It need not be the least one: the first question is still answered by the recurrence.

All numbers are whole, so nothing is rounded. Cut i lies before layer i; a split is the list of its cuts, from 0 to the
number of layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import TypeAlias

__all__ = ["best_split"]

#: Joins the load of a partition and what the later partitions join to.
Join: TypeAlias = Callable[[int, float], float]


def best_split(
    costs: Sequence[int], slowness: Sequence[int], farthest: Callable[[int, int], int] | None = None
) -> list[int] | None:
    """Return the cuts of the best split, or None if no split keeps the limits.

    Args:
        costs: the cost of each layer
        slowness: for each partition, the factor that turns the costs of its layers into its load
        farthest: returns the farthest cut where a partition may end, given its number and the cut where it starts,
            which is the answer if no layer fits; for starts further right it is no further left (default: no limits)
    """
    split = _Split(costs, slowness, farthest)
    cuts = split.least(max, split.loose_bound())
    if cuts is None:
        return None
    return split.least(lambda load, rest: load * load + rest, split.largest_load(cuts))


class _Split:
    """Layers in a row, by the sum of their costs before each cut, and devices to spread them over."""

    def __init__(
        self, costs: Sequence[int], slowness: Sequence[int], farthest: Callable[[int, int], int] | None
    ) -> None:
        self._sums = list(accumulate(costs, initial=0))
        self._layers, self._n = len(costs), len(slowness)
        self._slowness, self._farthest = slowness, farthest

    def largest_load(self, cuts: Sequence[int]) -> int:
        """Return the largest load of a split."""
        spans = zip(pairwise(cuts), self._slowness)
        return max([(self._sums[end] - self._sums[start]) * factor for (start, end), factor in spans])

    def loose_bound(self) -> int:
        """Return a bound that some split keeps, near the least one; or one that all splits keep, if none is found."""
        low, high = 0, self._sums[-1] * max(self._slowness)
        while high - low > high >> 16:
            middle = (low + high) // 2
            cuts = self._latest_cuts(middle)
            if cuts[-1] == self._layers and all(start < end for start, end in pairwise(cuts)):
                high = self.largest_load(cuts)
            else:
                low = middle + 1
        return high

    def least(self, join: Join, bound: int) -> list[int] | None:
        """Return the cuts of the split whose joined loads are least, or None if no split keeps the bound.

        Args:
            join: joins loads
            bound: the largest load
        """
        earliest, latest = self._earliest_cuts(bound), self._latest_cuts(bound)
        least: list[float] = [inf] * self._layers + [0]
        best_ends: list[list[int]] = []
        for j in reversed(range(self._n)):
            window = earliest[j], latest[j], earliest[j + 1], latest[j + 1]
            least, best_end = self._with_partition(j, join, bound, least, window)
            best_ends.insert(0, best_end)
        if least[0] == inf:
            return None
        return list(accumulate(best_ends, lambda cut, best_end: best_end[cut], initial=0))

    def _with_partition(
        self, j: int, join: Join, bound: int, rest: list[float], window: tuple[int, int, int, int]
    ) -> tuple[list[float], list[int]]:
        """Put partition j in front of the later ones.

        Args:
            rest: for each cut, what the later partitions join to if they start there; infinite if they cannot
            window: the first and the last cut where partition j may start, and those where it may end

        Returns:
            For each cut, what partition j and the later ones join to if partition j starts there, and its best end.
        """
        least: list[float] = [inf] * len(rest)
        best_end = [0] * len(rest)
        sums, factor = self._sums, self._slowness[j]

        def search(first: int, last: int, low: int, high: int) -> None:
            """Find the best ends of the starts from `first` to `last`, all of which lie from `low` to `high`."""
            if first > last:
                return
            start = (first + last) // 2
            # Without any end here, starts further left have no end beyond this start either.
            best_end[start] = start
            for end in range(max(low, start + 1), min(high, self._farthest_end(j, start, bound)) + 1):
                if rest[end] < least[start]:  # Otherwise this end is no better: joining never makes less of `rest`.
                    joined = join((sums[end] - sums[start]) * factor, rest[end])
                    if joined < least[start]:
                        least[start], best_end[start] = joined, end
            search(first, start - 1, low, best_end[start])
            search(start + 1, last, best_end[start], high)

        search(*window)
        return least, best_end

    def _latest_cuts(self, bound: int) -> list[int]:
        """Return cuts that lie at least as far right as those of all splits within a bound."""
        cuts = [0]
        for j in range(self._n):
            # Each partition after this one needs a layer.
            cuts.append(min(self._farthest_end(j, cuts[j], bound), self._layers - (self._n - 1 - j)))
        return cuts

    def _earliest_cuts(self, bound: int) -> list[int]:
        """Return cuts that lie at least as far left as those of all splits within a bound."""
        cuts = [self._layers]
        for j in reversed(range(self._n)):
            # Each partition before this one needs a layer.
            ends_of = partial(self._farthest_end, j, bound=bound)
            cuts.insert(0, j + bisect_left(range(j, self._layers + 1), cuts[0], key=ends_of))
        return cuts

    def _farthest_end(self, j: int, start: int, bound: int) -> int:
        """Return the last cut where partition j may end, by its limit and by a bound on its load."""
        end = bisect_right(self._sums, self._sums[start] + bound // self._slowness[j]) - 1
        return end if self._farthest is None else min(end, self._farthest(j, start))
