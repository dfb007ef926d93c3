"""Layers in a row, to be cut into partitions: which splits keep a bound on the loads, and which bound is the least.

A bound can be kept if partitions that are filled from the left, each as far as the bound allows, reach the last
layer: whoever stops earlier leaves no less to the others. The least bound is found by bisection, where each trial
moves on to the nearest load that occurs (Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D
partitioning", 2004), so that a few dozen trials are enough.

All numbers are whole. Cut i lies before layer i; a split is the list of its cuts, from 0 to the number of layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["Cuts", "Row"]

Cuts = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Row:
    """Layers, and the devices that they are to be spread over.

    Attributes:
        costs: the sum of the costs before each cut
        sizes: the sum of the sizes before each cut
        slowness: by what the costs in each partition are multiplied to make its load
        limits: the largest size of each partition
    """

    costs: list[int]
    sizes: list[int]
    slowness: list[int]
    limits: list[int]

    @property
    def layers(self) -> int:
        return len(self.costs) - 1

    @property
    def partitions(self) -> int:
        return len(self.slowness)

    @property
    def no_bound(self) -> int:
        """A bound that no load exceeds."""
        return self.costs[-1] * max(self.slowness)

    @property
    def alike(self) -> bool:
        """Whether it makes no difference which partition has which layers."""
        return len(set(self.slowness)) == 1 and self.sizes[-1] == 0

    def load(self, j: int, start: int, end: int) -> int:
        """The load of partition j, if it has the layers between two cuts."""
        return (self.costs[end] - self.costs[start]) * self.slowness[j]

    def fill(self, bound: int, *, slack: int = 0, refused: list[int] | None = None) -> list[int] | None:
        """Fills the partitions from the left, each as far as the bound and its limit allow.

        Args:
            bound: the largest load allowed

        Keyword Args:
            slack: by how much sizes may exceed their limits
            refused: collects loads above the bound; under all bounds below the least of them, the same happens

        Returns:
            The split in which every cut lies as far to the right as in any other, or None if there is no split.
        """
        cuts = [0] * (self.partitions + 1)
        rightmost = [self.layers - self.partitions + j for j in range(self.partitions + 1)]

        j = 0
        while 0 <= j < self.partitions:
            start = cuts[j]
            end = bisect_right(self.costs, self.costs[start] + bound // self.slowness[j]) - 1
            if refused is not None and end < self.layers:
                refused.append(self.load(j, start, end + 1))
            fits = bisect_right(self.sizes, self.sizes[start] + self.limits[j] + slack) - 1

            cuts[j + 1] = min(end, fits, rightmost[j + 1])
            if cuts[j + 1] > start:
                j += 1
            else:
                # Nothing would be left for this partition, or nothing that it can take: the one before has to
                # stop earlier.
                rightmost[j] = cuts[j + 1] - 1
                j -= 1

        return cuts if j == self.partitions and cuts[-1] == self.layers else None

    def least_bound(self) -> int:
        """The smallest possible largest load. There has to be a split within the limits."""
        # Some partition takes the costliest layer.
        low = max(after - before for before, after in pairwise(self.costs)) * min(self.slowness)
        high = self.no_bound
        while low < high:
            refused: list[int] = []
            cuts = self.fill((low + high) // 2, refused=refused)
            if cuts is None:
                low = min(refused)
            else:
                high = max(self.load(j, start, end) for j, (start, end) in enumerate(pairwise(cuts)))
        return high

    def least_slack(self) -> int:
        """By how much, at least, some size exceeds its limit. There has to be no split within the limits."""
        low, high = 1, self.sizes[-1]
        while low < high:
            middle = (low + high) // 2
            if self.fill(self.no_bound, slack=middle) is None:
                low = middle + 1
            else:
                high = middle
        return high

    def leftmost_start(self, end: int, most: int, limit: int) -> int:
        """The leftmost cut where a partition may start that ends at a cut.

        Args:
            end: where it ends
            most: the largest sum of costs allowed
            limit: the largest sum of sizes allowed
        """
        return max(
            bisect_left(self.costs, self.costs[end] - most, hi=end),
            bisect_left(self.sizes, self.sizes[end] - limit, hi=end),
        )

    def mirrored(self) -> Row:
        """The same from right to left."""
        return Row(
            costs=[self.costs[-1] - before for before in reversed(self.costs)],
            sizes=[self.sizes[-1] - before for before in reversed(self.sizes)],
            slowness=self.slowness[::-1],
            limits=self.limits[::-1],
        )
