"""Simulate many choices at once, because a search asks for the seconds of thousands of them.

The order of a program is fixed, so a step is as long as the longest path through a fixed graph. Actions of one depth in
this graph are computed together, for all choices at once. A *price* of a partition is what it adds to a path:

    0..3   seconds of F, B, I and W
    4      seconds of the transfer at its beginning
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torchgpipe.schedule import Program
from torchgpipe.schedule.action import Action, in_order

__all__ = ["KINDS", "PRICES", "TRANSFER", "Array", "Makespan"]

Array: TypeAlias = npt.NDArray[np.float64]

KINDS = "FBIW"
TRANSFER = len(KINDS)
PRICES = TRANSFER + 1


class Makespan:
    """The graph of a program.

    Args:
        program: the actions of each device, which can run
        n: the number of partitions
    """

    def __init__(self, program: Program, n: int) -> None:
        self._n = n
        # Row 0 stands for the beginning of the step: what has nothing before it follows this row.
        row: dict[Action, int] = {}
        last = [0] * len(program)
        depth, before, foreign, price, boundary = [0], [0], [0], [0], [0]
        for action, device, needed in in_order(program):
            # What it needs of its own device is before it there.
            other = next((row[one] for one, is_foreign in needed if is_foreign), 0)
            edge = next((max(one.j, action.j) for one, is_foreign in needed if is_foreign), n)
            row[action] = len(depth)
            depth.append(1 + max(depth[last[device]], depth[other]))
            before.append(last[device])
            foreign.append(other)
            price.append(action.j * PRICES + KINDS.index(action.kind))
            boundary.append(edge * PRICES + TRANSFER)
            last[device] = row[action]
        order = np.argsort(depth, kind="stable")
        moved = np.empty_like(order)
        moved[order] = np.arange(len(order))
        self._before, self._foreign = moved[np.array(before)[order]], moved[np.array(foreign)[order]]
        self._price, self._boundary = np.array(price)[order], np.array(boundary)[order]
        counts = np.bincount(depth)
        self._levels = [slice(a, b) for a, b in pairwise(np.cumsum(counts).tolist())]

    def seconds(self, prices: Array) -> Array:
        """Return the seconds of a step.

        Args:
            prices: of each partition of each choice, [choices, n, PRICES]

        Returns:
            the seconds of each choice
        """
        return np.asarray(self._ends(self._flat(prices)).max(axis=0))

    def critical(self, prices: Array) -> Array:
        """Return for each choice how often a longest path has each price, as an array of the shape of ``prices``.

        The step of any choice takes at least the sum of its prices, each as often as this.
        """
        flat = self._flat(prices)
        ends = self._ends(flat)
        counts = np.zeros_like(flat)
        for choice in range(len(prices)):
            own, cost = ends[:, choice], flat[:, choice]
            row = int(own.argmax())
            while row:
                counts[self._price[row], choice] += 1
                before, foreign = self._before[row], self._foreign[row]
                if foreign and own[foreign] + cost[self._boundary[row]] > own[before]:
                    counts[self._boundary[row], choice] += 1
                    row = int(foreign)
                else:
                    row = int(before)
        return np.ascontiguousarray(counts[: self._n * PRICES].T.reshape(prices.shape))

    def _flat(self, prices: Array) -> Array:
        """Return the prices as [prices, choices], with those of a boundary that costs nothing at the end."""
        flat = prices.reshape(len(prices), -1).T
        return np.concatenate([flat, np.zeros((PRICES, flat.shape[1]))])

    def _ends(self, flat: Array) -> Array:
        ends = np.zeros((len(self._before), flat.shape[1]))
        for level in self._levels:
            arrived = ends[self._foreign[level]] + flat[self._boundary[level]]
            ends[level] = np.maximum(ends[self._before[level]], arrived) + flat[self._price[level]]
        return ends
