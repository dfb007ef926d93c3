"""Find a choice with a short simulated step among those that fit.

    1. Balance the seconds of the partitions (`partition`, exact). If that does not fit, move cuts until it does. If
       that does not help: with a partition a device, fill the devices from the left, each as far as its memory goes;
       with several, begin again with the bytes balanced, and compare all balances if they are few.
    2. Move cuts as long as that makes the simulated step shorter. Whatever fits only with recomputed layers is tried
       with them.

Cuts move one at a time, by a layer, and when no such move helps, several neighbouring cuts together. Nothing says that
the answer is the best. Predictions are some per cent off, and the best few alternatives run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, combinations, pairwise
from typing import TypeAlias

from torchgpipe_balancing.partition import check_partitions, partition
from torchgpipe_balancing.planning.fitting import Fitting, Span
from torchgpipe_balancing.planning.problem import Choice, Outcome, Problem
from torchgpipe_balancing.planning.rehearsal import PRICES, rehearsal_of

__all__ = ["Search", "solve"]

#: A balance by its cuts: cut j lies before the first layer of partition j, and the last cut behind the last layer.
Cuts: TypeAlias = tuple[int, ...]

#: So many neighbouring cuts are moved together at most.
_LONGEST = 3

#: So many balances are all compared, where devices have several partitions and no move of cuts leads to one that fits.
_FEW = 2000

#: Sums are rounded; a choice that is quicker by less than this share is not quicker.
_ROUNDING = 1e-12


def solve(problem: Problem) -> Search:
    """Search for a quick choice that fits the devices.

    Raises:
        ValueError: there are fewer layers than partitions.
    """
    search = Search(problem)
    search.improve()
    return search


class Search:
    """The search for a choice. It begins with one that fits, if it finds any.

    Attributes:
        problem: the problem
        seconds: of the best choice so far; infinite if it does not fit
        excess: the most bytes by which that choice exceeds the memory of a device; 0 or less if it fits
        tried: the number of balances that were simulated
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._n, self._size = len(problem.places), len(problem.layers)
        check_partitions(self._size, self._n)
        self._rehearsal = rehearsal_of(tuple(map(tuple, problem.program)), problem.places)
        self._fitting = Fitting(problem, self._rehearsal)
        self._devices = range(len(problem.devices))
        self._priced = cache(self._prices)
        self.tried = 0
        self._cuts = self._start()
        self.excess = self._misfit(self._cuts)
        self.seconds = self._seconds(self._cuts)

    @property
    def fits(self) -> bool:
        """Whether every device has the memory that it needs."""
        return self.excess <= 0

    def improve(self) -> None:
        """Move cuts as long as that makes the step quicker."""
        if self.fits:
            self._cuts, self.seconds = self._descended(self._cuts, self._seconds)

    @property
    def predicted(self) -> float:
        """The predicted seconds of the best choice so far."""
        return self.problem.predicted(self.seconds)

    @property
    def outcome(self) -> Outcome:
        """What the best choice so far costs."""
        return self.problem.outcome(self.choice)

    @property
    def choice(self) -> Choice:
        """The best choice so far; if nothing fits, one with the least excess that was found."""
        layers = map(self._fitting.recomputed, self._devices, self._spans(self._cuts))
        return Choice(tuple(end - start for start, end in pairwise(self._cuts)), frozenset().union(*layers))

    def _descended(self, cuts: Cuts, cost: Callable[[Cuts], float]) -> tuple[Cuts, float]:
        """Move cuts as long as that lowers a cost, and return them with it. A cost of 0 cannot be lowered."""
        value, longest = cost(cuts), 1
        while value > 0:
            candidates = [(cost(moved), moved) for moved in _moved(cuts, longest)]
            least, best = min(candidates, key=lambda candidate: candidate[0], default=(math.inf, cuts))
            if least < value * (1 - _ROUNDING):
                cuts, value, longest = best, least, 1
            elif longest < _LONGEST:
                longest = _LONGEST
            else:
                break
        return cuts, value

    # ---- A balance to begin with.

    def _start(self) -> Cuts:
        layers = self.problem.layers
        even = self._even([layer.forward + layer.backward for layer in layers])
        if self._misfit(even) <= 0:
            return even
        near = self._near(even)
        if all(len(partitions) == 1 for partitions in self._rehearsal.partitions):
            return near if self._misfit(near) <= 0 else self._filled(0.0) or self._nearest(even)
        most = max([float(held[..., 0].max()) for held in self._rehearsal.held])
        even_in_bytes = self._even([most * layer.kept + layer.state for layer in layers])
        cuts = min(near, self._near(even_in_bytes), key=self._misfit)
        if self._misfit(cuts) > 0 and math.comb(self._size - 1, self._n - 1) <= _FEW:
            cuts_between = combinations(range(1, self._size), self._n - 1)
            cuts = min([(0, *between, self._size) for between in cuts_between], key=self._misfit)
        return cuts

    def _even(self, loads: Sequence[float]) -> Cuts:
        whole = sum(loads) or 1.0
        speeds = tuple([1 / self.problem.devices[place].slowness for place in self.problem.places])
        return _balanced(tuple([round(load / whole * 2**30) for load in loads]), speeds)

    def _near(self, cuts: Cuts) -> Cuts:
        """Move cuts as long as that lowers the largest excess, or until all fits."""
        return self._descended(cuts, self._distance)[0]

    def _nearest(self, cuts: Cuts) -> Cuts:
        """Return a balance with nearly the least largest excess, given any; nothing fits."""
        low, most = 0.0, self._misfit(cuts)
        while most - low > 1:  # a byte
            middle = (low + most) / 2
            full = self._filled(middle)
            low, most, cuts = (low, self._misfit(full), full) if full else (middle, most, cuts)
        return self._near(cuts)

    def _filled(self, excess: float) -> Cuts | None:
        """Fill the devices from the left, each with as many layers as exceed its memory by no more than this."""
        cuts = [0]
        for j, place in enumerate(self.problem.places):
            start = cuts[-1]
            most = self._size - (self._n - 1 - j)
            # A partition with more layers does not need less memory.
            ends = range(start + 1, most + 1)
            count = bisect_right(ends, excess, key=lambda end: self._fitting.excess(place, ((start, end),)))
            if not count:
                return None
            cuts.append(start + count)
        return tuple(cuts) if cuts[-1] == self._size else None

    # ---- What a balance costs.

    def _spans(self, cuts: Cuts) -> list[tuple[Span, ...]]:
        """Return the layers of the partitions of each device."""
        spans = list(pairwise(cuts))
        return [tuple([spans[j] for j in partitions]) for partitions in self._rehearsal.partitions]

    def _excesses(self, cuts: Cuts) -> list[float]:
        return list(map(self._fitting.excess, self._devices, self._spans(cuts)))

    def _misfit(self, cuts: Cuts) -> float:
        """Return the least largest excess of a balance, in bytes; 0 or less if all fits."""
        return max(self._excesses(cuts))

    def _distance(self, cuts: Cuts) -> float:
        """Return the largest excess, and a little of all: so it shrinks also where several devices lack as much."""
        over = [max(0.0, excess) for excess in self._excesses(cuts)]
        return max(over) + 0.05 * sum(over)

    def _seconds(self, cuts: Cuts) -> float:
        """Return the seconds of a balance that fits; infinite for others."""
        if self._misfit(cuts) > 0:
            return math.inf
        self.tried += 1
        prices = [0.0] * (self._n * PRICES)
        for device, spans in enumerate(self._spans(cuts)):
            for j, of_partition in zip(self._rehearsal.partitions[device], self._priced(device, spans)):
                prices[j * PRICES : (j + 1) * PRICES] = of_partition
        return self._rehearsal.seconds(prices)

    def _prices(self, device: int, spans: tuple[Span, ...]) -> list[list[float]]:
        """Return the prices of the partitions of a device, with the layers recomputed that have to be."""
        layers, problem = self._fitting.recomputed(device, spans), self.problem
        costs = [problem.partition_cost(j, *span, layers) for j, span in zip(self._rehearsal.partitions[device], spans)]
        return [[*cost.seconds.values(), problem.transfer(cost)] for cost in costs]


@lru_cache(maxsize=64)  # Several schedules have the same layers and devices.
def _balanced(loads: tuple[int, ...], speeds: tuple[float, ...]) -> Cuts:
    return tuple(accumulate(partition(loads, speeds=speeds), initial=0))


def _moved(cuts: Cuts, longest: int) -> Iterator[Cuts]:
    """Yield balances with up to so many neighbouring cuts moved by a layer; no partition is empty."""
    n = len(cuts) - 1
    for first in range(1, n):
        for last in range(first, min(n, first + longest)):
            for step in (-1, 1):
                if cuts[first] + step > cuts[first - 1] and cuts[last] + step < cuts[last + 1]:
                    yield (*cuts[:first], *(cut + step for cut in cuts[first : last + 1]), *cuts[last + 1 :])
