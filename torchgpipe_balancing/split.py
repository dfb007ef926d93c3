"""Find the best split exactly: first the smallest largest load, then the least sum of squared loads.

One recurrence answers both questions. It adds the partitions from the last to the first::

    least[j][start]  =  min over end of  join(load(j, start, end), least[j + 1][end])

For the first question `join` takes the larger of the two. For the second it adds the square of the load, and no load
may exceed the answer to the first question.

No cost is negative. Hence the further right a partition starts, the further right its best end lies. After the best
end of the middle start is known, each half of the starts searches on its own side of that end only (Galil and Park,
"Dynamic programming with convexity, concavity and sparsity", 1992).

All numbers are whole, so nothing is rounded. Cut i lies before layer i; a split is the list of its cuts, from 0 to the
number of layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

__all__ = ["best_split"]


def best_split(
    costs: Sequence[int], sizes: Sequence[int], slowness: Sequence[int], limits: Sequence[int]
) -> list[int] | None:
    """Return the cuts of the best split, or None if no split keeps the limits.

    Args:
        costs: the cost of each layer
        sizes: the size of each layer
        slowness: for each partition, the factor that turns the costs of its layers into its load
        limits: for each partition, the largest sum of sizes
    """
    split = _Split(costs, sizes, slowness, limits)
    cuts = split.least(bound=None)
    if cuts is None:
        return None
    return split.least(bound=max(split.load(j, start, end) for j, (start, end) in enumerate(pairwise(cuts))))


class _Split:
    """Layers in a row, by the sums of their costs and sizes before each cut, and devices to spread them over."""

    def __init__(
        self, costs: Sequence[int], sizes: Sequence[int], slowness: Sequence[int], limits: Sequence[int]
    ) -> None:
        self._costs, self._sizes = (list(accumulate(values, initial=0)) for values in (costs, sizes))
        self._slowness, self._limits = slowness, limits

    def load(self, j: int, start: int, end: int) -> int:
        """Return the load of partition j if it has the layers between two cuts."""
        return (self._costs[end] - self._costs[start]) * self._slowness[j]

    def least(self, bound: int | None) -> list[int] | None:
        """Return the cuts with the least sum of squared loads that are within a bound; or with the least largest load.

        Args:
            bound: the largest load, or None to find it
        """
        layers, n = len(self._costs) - 1, len(self._slowness)
        least: list[float] = [inf] * layers + [0]
        best_ends: list[list[int]] = []
        for j in reversed(range(n)):
            least, best_end = self._with_partition(j, bound, least)
            best_ends.insert(0, best_end)
        if least[0] == inf:
            return None
        return list(accumulate(best_ends, lambda cut, best_end: best_end[cut], initial=0))

    def _with_partition(self, j: int, bound: int | None, rest: list[float]) -> tuple[list[float], list[int]]:
        """Put partition j in front of the later ones.

        Args:
            rest: for each cut, what the later partitions join to if they start there; infinite if they cannot

        Returns:
            For each cut, what partition j and the later ones join to if partition j starts there, and its best end.
        """
        least: list[float] = [inf] * len(rest)
        best_end = [0] * len(rest)

        def search(first: int, last: int, low: int, high: int) -> None:
            """Find the best ends of the starts from `first` to `last`, all of which lie from `low` to `high`."""
            if first > last:
                return
            start = (first + last) // 2
            # Without any end here, starts further left have no end beyond this start either.
            best_end[start] = start
            for end in range(max(low, start + 1), min(high, self._farthest_end(j, start, bound)) + 1):
                if rest[end] < least[start]:  # Otherwise this end is no better: joining never makes less of `rest`.
                    load = self.load(j, start, end)
                    joined = max(load, rest[end]) if bound is None else load * load + rest[end]
                    if joined < least[start]:
                        least[start], best_end[start] = joined, end
            search(first, start - 1, low, best_end[start])
            search(start + 1, last, best_end[start], high)

        # Each partition before this one, and each one after it, needs a layer.
        layers, after = len(rest) - 1, len(self._slowness) - 1 - j
        search(j, layers - after - 1, j + 1, layers - after)
        return least, best_end

    def _farthest_end(self, j: int, start: int, bound: int | None) -> int:
        """Return the last cut where partition j may end, by its limit and by a bound on its load."""
        end = bisect_right(self._sizes, self._sizes[start] + self._limits[j])
        if bound is not None:
            end = min(end, bisect_right(self._costs, self._costs[start] + bound // self._slowness[j]))
        return end - 1
