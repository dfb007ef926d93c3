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
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeAlias

__all__ = ["SplitProblem", "best_split"]

Join: TypeAlias = Callable[[int, float], float]


@dataclass(frozen=True)
class SplitProblem:
    """Layers in a row, and the devices to spread them over.

    Attributes:
        costs: the sum of the costs before each cut
        sizes: the sum of the sizes before each cut
        slowness: for each partition, the factor that turns the costs of its layers into its load
        limits: for each partition, the largest sum of sizes
    """

    costs: list[int]
    sizes: list[int]
    slowness: list[int]
    limits: list[int]

    def load(self, j: int, start: int, end: int) -> int:
        """Return the load of partition j if it has the layers between two cuts."""
        return (self.costs[end] - self.costs[start]) * self.slowness[j]

    def farthest_end(self, j: int, start: int, bound: int) -> int:
        """Return the last cut where partition j may end, by its limit and by a bound on its load."""
        by_cost = bisect_right(self.costs, self.costs[start] + bound // self.slowness[j])
        by_size = bisect_right(self.sizes, self.sizes[start] + self.limits[j])
        return min(by_cost, by_size) - 1


def best_split(problem: SplitProblem) -> list[int] | None:
    """Return the cuts of the best split, or None if no split keeps the limits."""
    no_bound = problem.costs[-1] * max(problem.slowness)
    cuts = _least(problem, no_bound, max)
    if cuts is None:
        return None
    bound = max(problem.load(j, start, end) for j, (start, end) in enumerate(pairwise(cuts)))
    return _least(problem, bound, lambda load, rest: load * load + rest)


def _least(problem: SplitProblem, bound: int, join: Join) -> list[int] | None:
    """Return the cuts of the split whose joined loads are least, or None if no split keeps the bound and the limits."""
    layers, partitions = len(problem.costs) - 1, len(problem.slowness)
    rest: list[float] = [inf] * layers + [0]
    best_ends: list[list[int]] = []
    for j in reversed(range(partitions)):
        rest, best_end = _with_partition(problem, j, bound, join, rest)
        best_ends.append(best_end)
    if rest[0] == inf:
        return None
    cuts = [0]
    for best_end in reversed(best_ends):
        cuts.append(best_end[cuts[-1]])
    return cuts


def _with_partition(
    problem: SplitProblem, j: int, bound: int, join: Join, rest: list[float]
) -> tuple[list[float], list[int]]:
    """Put partition j in front of the later ones.

    Args:
        rest: for each cut, what the later partitions join to if they start there; infinite if they cannot

    Returns:
        For each cut, what partition j and the later ones join to if partition j starts there, and its best end.
    """
    least: list[float] = [inf] * len(rest)
    best_end = [0] * len(rest)

    def search(first: int, last: int, left: int, right: int) -> None:
        """Find the best ends of the starts from `first` to `last`, all of which lie from `left` to `right`."""
        if first > last:
            return
        start = (first + last) // 2
        # Without any end here, starts further left have no end beyond this start either.
        best_end[start] = start
        for end in range(max(left, start + 1), min(right, problem.farthest_end(j, start, bound)) + 1):
            if rest[end] < least[start]:  # Otherwise this end is no better: joining never makes less of `rest`.
                joined = join(problem.load(j, start, end), rest[end])
                if joined < least[start]:
                    least[start], best_end[start] = joined, end
        search(first, start - 1, left, best_end[start])
        search(start + 1, last, best_end[start], right)

    # Each partition before this one, and each one after it, needs a layer.
    after = len(problem.slowness) - 1 - j
    layers = len(rest) - 1
    search(j, layers - after - 1, j + 1, layers - after)
    return least, best_end
