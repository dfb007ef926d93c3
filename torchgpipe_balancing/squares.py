"""Of the splits within a bound on the loads, one with the least sum of squared loads.

Many splits share the smallest possible bound, as it leaves the lighter partitions free to be as uneven as they
like. The sum of squares evens them out. It is found partition by partition, for each cut where one may end:

    least[j][end]  =  min over start of  least[j-1][start] + load(start, end)^2

1. Cuts that no split within the bound has are left out, and where partitions are alike, also those that cannot
   be on a split better than one found quickly.
2. No cost is negative, hence the further right the end, the further right the best start. Once it is known for
   the end in the middle, the ends on either side need to look on their side only (Galil and Park, "Dynamic
   programming with convexity, concavity and sparsity", 1992).
3. This is done in floating point, with a bound on its error. Cuts that are on no split within this error of the
   best are left out, and what remains, mostly a single split, is compared again in whole numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from torchgpipe_balancing.row import Cuts, Row

__all__ = ["least_squares"]

Numbers = npt.NDArray[Any]  # float64, or whole numbers of any size as objects

#: Where there are no more pairs of partition and cut than this, it does not pay to look for promising ones.
FEW = 8192


def least_squares(row: Row, bound: int) -> list[int]:
    """The split with the least sum of squared loads.

    Args:
        row: what is split
        bound: the largest load allowed; there has to be a split within it
    """
    stages = _stages(row, bound)
    if row.no_bound < 2**26:
        # Floating point is exact: squares, and their sums, are whole numbers below 2^52.
        return _best(stages, _steps(stages, np.array(row.costs, dtype=np.float64), row.slowness))

    # Loads relative to the bound, from 0 to 1. Devices that are slower by many powers of ten would overflow; the
    # weight they get instead makes the error so large that nothing is left out on account of it.
    total = row.costs[-1]
    sums = np.array([before / total for before in row.costs])
    weights = [float(min(Fraction(total * slowness, bound), Fraction(2**300))) for slowness in row.slowness]
    close = _close(row, stages, _steps(stages, sums, weights), _error(row, max(weights)))
    return _best(close, _steps(close, np.array(row.costs, dtype=object), row.slowness))


@dataclass(frozen=True)
class _Stage:
    """Where a partition may end, and for each of these ends, the leftmost cut where it may start."""

    ends: Cuts  # ascending
    starts: Cuts


def _stages(row: Row, bound: int) -> list[_Stage]:
    """A stage for each partition."""
    last, mirrored = row.fill(bound), row.mirrored().fill(bound)
    assert last is not None and mirrored is not None
    first = [row.layers - cut for cut in reversed(mirrored)]
    prospects = _Prospects(row, bound) if row.alike and sum(last) - sum(first) > FEW else None

    stages = []
    reached = np.array([0])
    leftmost_start = cache(row.leftmost_start)  # the same for partitions that are alike
    for j in range(row.partitions):
        ends = np.arange(first[j + 1], last[j + 1] + 1)
        if prospects is not None:
            ends = ends[prospects.of(j + 1, first[j + 1], last[j + 1])]
        most, limit = bound // row.slowness[j], row.limits[j]
        starts = np.array([leftmost_start(end, most, limit) for end in ends.tolist()], dtype=np.intp)
        # With unequal devices there are gaps: cuts after a layer that this partition cannot take.
        reachable = np.searchsorted(reached, starts) < np.searchsorted(reached, ends)
        stages.append(_Stage(ends[reachable], starts[reachable]))
        reached = stages[-1].ends
    return stages


class _Prospects:
    """Tells which cuts can be on a split that is no worse than a certain one.

    Let some partitions have the load L together. For any t, ``(load - t)^2`` is not negative, so the sum of their
    squares is at least ``2 t L - t^2`` for each partition; and a layer that costs c > t adds ``(c - t)^2``, as its
    partition's load is no less. With the best t for either side of a cut, this is what a split through the cut
    has at least.
    """

    #: What is tried as t, in units of what lighter partitions have at most in the split that is compared with.
    TRIED = 1.1 ** np.arange(-8, 9)[:, None]
    #: Layers of so many units are alone in their partitions, for every t. Their squares are in every sum.
    ALONE = 3

    def __init__(self, row: Row, bound: int) -> None:
        """Splits a row of partitions that are alike: `bound` is one that can be kept."""
        low, unit = 1, max(bound, 1)
        while low < unit:
            middle = (low + unit) // 2
            if _packed(row, middle) is None:
                low = middle + 1
            else:
                unit = middle
        split = _packed(row, unit)
        assert split is not None

        costs = [after - before for before, after in pairwise(row.costs)]
        squares = sum((row.costs[end] - row.costs[start]) ** 2 for start, end in pairwise(split))
        squares -= sum(cost**2 for cost in costs if cost >= self.ALONE * unit)
        # Rounding is far below these margins.
        self._enough = float(Fraction(squares, unit**2)) * (1 + 1e-9) + 1e-9 * row.partitions
        self._partitions = row.partitions

        cost = np.array([min(cost, self.ALONE * unit) / unit for cost in costs])
        heavy = np.where(cost < self.ALONE, cost**2, 0) + self.TRIED**2
        least = np.where(cost < self.TRIED, 2 * self.TRIED * cost, heavy)
        self._sums = np.cumsum(np.insert(least, 0, 0, axis=1), axis=1)

    def of(self, j: int, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Which of the cuts from `first` to `last` can have j partitions to their left."""
        before = self._sums[:, first : last + 1]
        left = before - j * self.TRIED**2
        right = self._sums[:, -1:] - before - (self._partitions - j) * self.TRIED**2
        promising: npt.NDArray[np.bool_] = left.max(axis=0) + right.max(axis=0) <= self._enough
        return promising


def _packed(row: Row, unit: int) -> list[int] | None:
    """Fills partitions up to the unit, a costlier layer having one to itself; None if they are not enough."""
    cuts = [0]
    while cuts[-1] < row.layers:
        if len(cuts) > row.partitions:
            return None
        end = bisect_right(row.costs, row.costs[cuts[-1]] + unit) - 1
        cuts.append(max(end, cuts[-1] + 1))
    return cuts


class _Step:
    """The recurrence, for one partition.

    Args:
        before: the least sum of squares up to each cut where it may start
        starts: these cuts
        stage: where it may end
        sums: the sum of costs before each cut
        weight: by what the difference of two sums is multiplied to make a load

    Attributes:
        least: the least sum of squares up to each end
        best: for each end, the index of the best start
    """

    #: Up to so many pairs of start and end are compared at once; more are divided. Measured.
    BLOCK = 8192

    def __init__(self, before: Numbers, starts: Cuts, stage: _Stage, sums: Numbers, weight: float) -> None:
        self._before = before
        self._starts = sums[starts] * weight
        self._ends = sums[stage.ends] * weight
        # The indices of the first and last start of each end. Narrow, as much time is spent on comparing them.
        self._first = np.searchsorted(starts, stage.starts).astype(np.int32)
        self._last = np.searchsorted(starts, stage.ends).astype(np.int32) - 1

        self.best = np.empty(len(stage.ends), dtype=np.intp)
        self.least = np.empty(len(stage.ends), dtype=sums.dtype)
        self._minimise(0, len(self._ends), 0, len(self._starts))

    def block(self, ends: slice | Cuts, starts: slice) -> Numbers:
        """The sums of squares for some ends (rows) and starts (columns); infinite for what is no partition."""
        squares: Numbers = self._ends[ends, None] - self._starts[starts]
        squares *= squares
        squares += self._before[starts]

        columns = np.arange(starts.start, starts.stop, dtype=np.int32)
        first, last = self._first[ends], self._last[ends]
        if first[-1] > starts.start:
            np.copyto(squares, math.inf, where=columns < first[:, None])
        if last[0] < starts.stop - 1:
            np.copyto(squares, math.inf, where=columns > last[:, None])
        return squares

    def _minimise(self, top: int, bottom: int, left: int, right: int) -> None:
        """Finds the best starts of the ends from `top` to before `bottom`, all from `left` to before `right`."""
        if top == bottom:
            return
        left = max(left, int(self._first[top]))
        right = min(right, int(self._last[bottom - 1]) + 1)

        if bottom - top == 1 or (bottom - top) * (right - left) <= self.BLOCK:
            squares = self.block(slice(top, bottom), slice(left, right))
            best = squares.argmin(axis=1)
            self.best[top:bottom] = best + left
            self.least[top:bottom] = squares[np.arange(bottom - top), best]
        else:
            middle = (top + bottom) // 2
            self._minimise(middle, middle + 1, left, right)
            best_of_middle = int(self.best[middle])
            self._minimise(top, middle, left, best_of_middle + 1)
            self._minimise(middle + 1, bottom, best_of_middle, right)


def _steps(stages: list[_Stage], sums: Numbers, weights: Sequence[float]) -> list[_Step]:
    """The recurrence for all partitions, in the numbers that it is given."""
    steps: list[_Step] = []
    starts, before = np.array([0]), sums[:1]  # the sum before the first cut is 0
    for stage, weight in zip(stages, weights):
        steps.append(_Step(before, starts, stage, sums, weight))
        starts, before = stage.ends, steps[-1].least
    return steps


def _best(stages: list[_Stage], steps: list[_Step]) -> list[int]:
    """Follows the best starts, from the last cut back to the first."""
    cuts = []
    end = 0
    for stage, step in zip(reversed(stages), reversed(steps)):
        cuts.append(int(stage.ends[end]))
        end = step.best[end]
    return [0, *reversed(cuts)]


def _error(row: Row, weight: float) -> float:
    """By how much a sum of squares, in floating point, may be off.

    A sum of costs is off by 2^-53 at most, being no larger than 1, and the difference of two by less than 2^-51.
    So is a load, times its weight, its own rounding included. The sum of squares is no larger than the number of
    partitions, and loses as many times 2^-53 at each addition. Looking for the best start in ever smaller parts,
    `bit_length` times, may each time miss it for one that is as close as this.
    """
    load = weight * 2.0**-51
    square = 2 * load + load * load + row.partitions * 2.0**-52
    return 2 * row.partitions * row.layers.bit_length() * square


def _close(row: Row, stages: list[_Stage], steps: list[_Step], error: float) -> list[_Stage]:
    """Leaves out all cuts but those on splits that are within the error of the best."""
    close: list[_Stage] = []
    ends = np.array([0])
    for j in reversed(range(row.partitions)):
        close.append(_Stage(stages[j].ends[ends], stages[j].starts[ends]))

        starts = stages[j - 1].ends if j else np.array([0])
        chosen = steps[j].block(ends, slice(0, len(starts))) <= steps[j].least[ends, None] + error
        # Of starts with nothing but layers between them that cost and take nothing, the right one is as good.
        same = [row.costs[a] == row.costs[b] and row.sizes[a] == row.sizes[b] for a, b in pairwise(starts)]
        chosen[:, :-1] &= ~(chosen[:, 1:] & np.array(same, dtype=bool))
        ends = np.flatnonzero(chosen.any(axis=0))
    return close[::-1]
