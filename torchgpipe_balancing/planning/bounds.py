"""Bound the seconds of all balances at once: no step is shorter than any path through the graph of its program.

A path says how often it has each price (see `makespan.py`), and is a sum over the partitions. Its least sum over all
balances is a shortest path over the cuts, from the left (`before`) and from the right (`after`). Three consequences:

- No balance that gives partition j the layers from a to b is quicker than ``before[a] + sum of j + after[b]``, for any
  path. The largest of these bounds, over paths, is `through[j][a, b]`.
- A balance is no quicker than the largest bound of its partitions. The least such maximum over all balances is a
  shortest path, too: `minimax`.
- A partition whose bound is too large is forbidden; then the shortest paths become longer, and forbid more. If nothing
  is left, no balance is as quick as that.

A mean of paths bounds as well as a path. Where devices have several partitions, the mean over the devices is the one
that counts: a balance can lighten one device only by loading another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchgpipe_balancing.planning.makespan import PRICES, TRANSFER, Array, Makespan

__all__ = ["Bounds", "Flags", "even_cuts", "first_paths"]

Flags = npt.NDArray[np.bool_]


def first_paths(graph: Makespan, prices: Array, places: Sequence[int], slowness: Sequence[float]) -> Array:
    """Return paths that matter wherever the cuts are, as counts of prices, [paths, n, PRICES].

    Each is the longest path if the partitions of one device are slower than the others, a little or much; and one is
    the mean of these.

    Args:
        graph: the graph of the program
        prices: of each partition in an even balance, [n, PRICES]
        places: the index of the device of each partition
        slowness: of each device
    """
    scenarios = []
    for factor in (1.05, 2.0):
        for device in range(len(slowness)):
            scenario = prices.copy()
            scenario[[j for j, place in enumerate(places) if place == device], :TRANSFER] *= factor
            scenarios.append(scenario)
    paths = graph.critical(np.array([prices, *scenarios]))
    weights = 1 / np.array(slowness)
    mean = np.tensordot(weights / weights.sum(), paths[-len(slowness) :], 1)
    return np.unique(np.concatenate([paths, mean[None]]), axis=0)


class Bounds:
    """Lower bounds of the seconds of balances.

    Args:
        prices: lower bounds of the prices of each partition, [n, PRICES, start, end]
        allowed: the partitions that a balance may have, [n, start, end]
        paths: the paths, as counts of prices, [paths, n, PRICES]

    Attributes:
        paths: the paths
        after: for each path, the least sum of partition j and all behind it if it starts there, [paths, n + 1, start]
        through: for each partition, the least seconds of a balance that has it, [n, start, end]
        minimax: for each start of a partition, the least that the largest `through` from there on can be,
            [n + 1, start]
    """

    def __init__(self, prices: Array, allowed: Flags, paths: Array) -> None:
        self.prices, self.paths = prices, paths
        self._n, self._size = len(allowed), allowed.shape[1] - 1
        self.through = np.where(allowed, 0.0, math.inf)
        self.after: Array
        self.minimax: Array
        self._update(paths)

    @property
    def least(self) -> float:
        """The bound of all balances; infinite if no balance is allowed."""
        return float(self.minimax[0, 0])

    def add(self, paths: Array) -> None:
        """Take further paths into account."""
        after = self.after
        self.paths = np.concatenate([self.paths, paths])
        self._update(paths)
        self.after = np.concatenate([after, self.after])

    def forbid(self, limit: float) -> bool:
        """Forbid all partitions that no balance below the limit has; return whether any were."""
        forbidden = (self.through >= limit) & np.isfinite(self.through)
        self.through[forbidden] = math.inf
        if not forbidden.any():
            return False
        self._update(self.paths)
        return True

    def tighten(self, limit: float, rounds: int = 20) -> None:
        """Forbid all that no balance below the limit has, again and again."""
        for _ in range(rounds):
            if not self.forbid(limit) or self.least >= limit:
                return

    def copy(self) -> Bounds:
        """Return bounds that can be tightened on their own."""
        other = object.__new__(Bounds)
        other.__dict__ = dict(self.__dict__, through=self.through.copy())
        return other

    def balance(self) -> list[int]:
        """Return the cuts of a balance whose largest bound is the least, and whose other bounds are small, too."""
        return even_cuts(np.where(self.through <= self.least * (1 + 1e-12), self.through, math.inf))

    def _update(self, paths: Array) -> None:
        """Compute `after` for these paths, and raise `through` by them."""
        n, size, count = self._n, self._size, len(paths)
        finite = np.isfinite(self.through)
        # The starts and ends that are left, for each partition: mostly few.
        starts = [_span(finite[j].any(1)) for j in range(n)]
        ends = [_span(finite[j].any(0)) for j in range(n)]
        sums = []
        for j in range(n):
            block = self.prices[j, :, starts[j], ends[j]]
            total = (paths[:, j] @ block.reshape(PRICES, -1)).reshape(count, *block.shape[1:])
            sums.append(np.where(finite[j, starts[j], ends[j]], total, math.inf))
        before = np.full((count, n + 1, size + 1), math.inf)
        after = np.full((count, n + 1, size + 1), math.inf)
        before[:, 0, 0] = after[:, n, size] = 0.0
        for j in range(n):
            if sums[j].size:
                before[:, j + 1, ends[j]] = (before[:, j, starts[j], None] + sums[j]).min(1)
        self.minimax = np.full((n + 1, size + 1), math.inf)
        self.minimax[n, size] = 0.0
        for j in reversed(range(n)):
            if not sums[j].size:
                continue
            both = sums[j] + after[:, j + 1, None, ends[j]]
            after[:, j, starts[j]] = both.min(2)
            both += before[:, j, starts[j], None]
            own = self.through[j, starts[j], ends[j]]
            np.maximum(own, both.max(0), out=own)
            self.minimax[j, starts[j]] = np.maximum(own, self.minimax[j + 1, None, ends[j]]).min(1)
        self.after = after


def even_cuts(weights: Array) -> list[int]:
    """Return the cuts of a balance whose weights are even.

    Args:
        weights: of each partition, infinite where there may be none, [n, start, end]; some balance is possible
    """
    # To the eighth power a large weight counts much more than several small ones.
    largest = weights[np.isfinite(weights)].max() or 1.0
    return _lightest((weights / largest) ** 8)


def _lightest(weights: Array) -> list[int]:
    """Return the cuts of the balance with the least sum of weights."""
    n, size = len(weights), weights.shape[1] - 1
    rest = np.full((n + 1, size + 1), math.inf)
    rest[n, size] = 0.0
    for j in reversed(range(n)):
        rest[j] = (weights[j] + rest[j + 1]).min(1)
    cuts = [0]
    for j in range(n):
        cuts.append(int((weights[j, cuts[-1]] + rest[j + 1]).argmin()))
    return cuts


def _span(flags: Flags) -> slice:
    """Return the part from the first flag to the last one."""
    found = np.flatnonzero(flags)
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)
