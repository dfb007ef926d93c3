"""The memory of whole balances: which of them fit, what they lack, and which is nearest to fitting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from torchgpipe_balancing.planning.makespan import Array
from torchgpipe_balancing.planning.recompute import least_excess
from torchgpipe_balancing.planning.tables import Tables

__all__ = ["Cuts", "Fitting", "moved"]

#: A balance by its cuts: cut j lies before the first layer of partition j, and the last cut behind the last layer.
Cuts: TypeAlias = tuple[int, ...]


class Fitting:
    """The memory of balances.

    Args:
        tables: the memory of every partition that could be

    Attributes:
        is_lone: whether every device has one partition only
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._problem = tables.problem
        self.is_lone = all(holding.is_lone for holding in tables.holdings)

    def may(self, cuts: Cuts) -> bool:
        """Return whether each partition fits, if it has its device for itself."""
        return all(self._tables.excess[j, start, end] <= 0 for j, (start, end) in enumerate(pairwise(cuts)))

    def fits(self, cuts: Cuts) -> bool:
        """Return whether a balance fits, if the right layers are recomputed."""
        return self.may(cuts) and self._excess(cuts) <= 0

    def needs(self, cuts: Cuts, recomputed: frozenset[int]) -> list[float]:
        """Return the most bytes of each device."""
        spans = list(pairwise(cuts))
        needs = []
        for holding in self._tables.holdings:
            costs = [self._problem.partition_cost(j, *spans[j], recomputed) for j in holding.partitions]
            most = holding.most(np.array([one.kept for one in costs]), np.array([one.waiting for one in costs]))
            needs.append(float(most) + sum([one.state for one in costs]) + max([one.room for one in costs]))
        return needs

    def nearest(self, cuts: Cuts) -> Cuts:
        """Move cuts as long as that lowers the largest excess, or until all fits."""
        if self.is_lone and self.may(cuts):
            return cuts

        def distance(found: Sequence[Cuts]) -> Array:
            # The small term lets a balance come nearer that has several devices with about the same excess.
            over = self._over(found)
            return np.asarray(over.max(1) + 0.05 * np.maximum(over, 0.0).sum(1))

        least = float(distance([cuts])[0])
        for _ in range(200):
            others = list(moved(cuts))
            if least <= 0 or not others:
                break
            distances = distance(others)
            best = int(distances.argmin())
            if distances[best] >= least:
                break
            least, cuts = float(distances[best]), others[best]
        return cuts

    def least_misfit(self, known: Sequence[Cuts]) -> tuple[Cuts, frozenset[int]]:
        """Return the balance that is nearest to fitting, with the layers to recompute.

        Args:
            known: balances that have been tried
        """
        # The least largest excess, as if every partition had its device for itself.
        n, size = len(self._problem.places), len(self._problem.layers)
        excess = self._tables.excess
        rest = np.full((n + 1, size + 1), math.inf)
        rest[n, size] = 0.0
        for j in reversed(range(n)):
            rest[j] = np.maximum(excess[j], rest[j + 1]).min(1)
        cuts: Cuts = (0,)
        for j in range(n):
            cuts = (*cuts, int(np.maximum(excess[j, cuts[-1]], rest[j + 1]).argmin()))
        if not self.is_lone:
            cuts = min([self.nearest(cuts), *known], key=self._excess)
        recomputed = [own for _, own in self._least_excesses(cuts)]
        return cuts, frozenset[int]().union(*recomputed)

    def _excess(self, cuts: Cuts) -> float:
        """Return the least largest excess of a balance, in bytes; negative if some are left."""
        return float(self._over([cuts]).max())

    def _over(self, found: Sequence[Cuts]) -> Array:
        """Return the least excess of each device, for each balance, [balances, devices]."""
        tables = self._tables
        if tables.recomputes:
            return np.array([[over for over, _ in self._least_excesses(cuts)] for cuts in found])
        cuts = np.array(found)
        kept, waiting, state = tables.held[:, cuts[:, :-1], cuts[:, 1:]]
        over = [
            holding.most(kept[:, holding.partitions], waiting[:, holding.partitions])
            + state[:, holding.partitions].sum(1)
            - device.memory
            for holding, device in zip(tables.holdings, self._problem.devices)
        ]
        return np.stack(over, axis=1)

    def _least_excesses(self, cuts: Cuts) -> Iterator[tuple[float, frozenset[int]]]:
        """Yield the least excess of each device, with the layers to recompute for it."""
        spans = list(pairwise(cuts))
        for device, holding in enumerate(self._tables.holdings):
            yield least_excess(self._tables, device, [spans[j] for j in holding.partitions])


def moved(cuts: Cuts) -> Iterator[Cuts]:
    """Yield balances with a run of neighbouring cuts moved by a layer, and single cuts by two; none is empty."""
    n = len(cuts) - 1
    longest = n if n <= 12 else 2
    for first in range(1, n):
        for last in range(first, min(n, first + longest)):
            for step in (-1, 1, -2, 2)[: 4 if first == last else 2]:
                if cuts[first] + step > cuts[first - 1] and cuts[last] + step < cuts[last + 1]:
                    yield (*cuts[:first], *(cut + step for cut in cuts[first : last + 1]), *cuts[last + 1 :])
