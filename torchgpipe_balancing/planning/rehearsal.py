"""Simulate many choices at once under one program, because a search asks for the seconds of thousands of them.

`torchgpipe.schedule.simulate` does the same for one choice, action by action. The order of a program is fixed, so a
step is as long as the longest path through a fixed graph. Actions of one depth in this graph are computed together, for
all choices at once. A *price* of a partition is what it adds to a path:

    0..3   seconds of F, B, I and W
    4      seconds of the transfer at its beginning
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torchgpipe.schedule.action import Action, Program, in_order
from torchgpipe.schedule.simulation import changes

__all__ = ["KINDS", "Array", "Rehearsal", "rehearsal_of"]

Array: TypeAlias = npt.NDArray[np.float64]

KINDS = "FBIW"
_TRANSFER = len(KINDS)
_PRICES = _TRANSFER + 1


class Rehearsal:
    """A program, prepared for many choices.

    Args:
        program: the actions of each device, which can run
        places: the index of the device of each partition

    Attributes:
        partitions: for each device, its partitions
        held: for each device, how many micro-batches each of its partitions holds from F to B or W, and how many from I
            to W, at all moments at which no count is below that of another moment; [moments, partitions, 2]
    """

    def __init__(self, program: Program, places: tuple[int, ...]) -> None:
        n = len(places)
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
            price.append(action.j * _PRICES + KINDS.index(action.kind))
            boundary.append(edge * _PRICES + _TRANSFER)
            last[device] = row[action]
        order = np.argsort(depth, kind="stable")
        moved = np.empty_like(order)
        moved[order] = np.arange(len(order))
        self._price, self._boundary = np.array(price)[order], np.array(boundary)[order]
        before_moved, foreign_moved = moved[np.array(before)[order]], moved[np.array(foreign)[order]]
        self._levels = [
            (slice(a, b), before_moved[a:b], foreign_moved[a:b])
            for a, b in pairwise(np.cumsum(np.bincount(depth)).tolist())
        ]
        self.partitions = [[j for j, place in enumerate(places) if place == device] for device in range(len(program))]
        self.held = [_held(own, partitions) for own, partitions in zip(program, self.partitions)]

    def seconds(self, prices: Array) -> Array:
        """Return the seconds of a step of each choice, given the prices of its partitions, [choices, n, prices]."""
        count = len(prices)
        # A boundary that costs nothing is behind all others.
        flat = np.concatenate([prices.reshape(count, -1).T, np.zeros((_PRICES, count))])
        passage, price = flat[self._boundary], flat[self._price]
        ends = np.zeros_like(price)
        for level, before, foreign in self._levels:
            start = ends.take(foreign, 0)
            start += passage[level]
            np.maximum(start, ends.take(before, 0), out=start)
            np.add(start, price[level], out=ends[level])
        return np.asarray(ends.max(axis=0))


@lru_cache(maxsize=64)  # Questions about more memory or other layers have the same programs.
def rehearsal_of(program: tuple[tuple[Action, ...], ...], places: tuple[int, ...]) -> Rehearsal:
    """Return the rehearsal of a program."""
    return Rehearsal(program, places)


def _held(actions: Sequence[Action], partitions: list[int]) -> Array:
    column = {j: k for k, j in enumerate(partitions)}
    units = [1.0] * (1 + partitions[-1])
    steps = np.zeros((2 * len(actions) + 1, len(column), 2))
    for row, action in enumerate(actions):
        for half in (0, 1):
            both = changes(action, units, units)[half]
            kept = changes(action, units, None)[half]
            steps[2 * row + half + 1, column[action.j]] = kept, both - kept
    moments = np.unique(np.cumsum(steps, axis=0), axis=0)
    flat = moments.reshape(len(moments), -1)
    return moments[[k for k, own in enumerate(flat) if not ((flat >= own).all(1) & (flat > own).any(1)).any()]]
