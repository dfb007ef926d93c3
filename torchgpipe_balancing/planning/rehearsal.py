"""Simulate many choices at once under one program, because a search asks for the seconds of thousands of them.

`torchgpipe.schedule.simulate` does the same for one choice, action by action. The order of a program is fixed, so a
step is as long as the longest path through a fixed graph, which is found for all choices at once. A *price* of a
partition is what it adds to a path:

    0..3   seconds of F, B, I and W
    4      seconds of the transfer at its beginning
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torchgpipe.schedule.action import Action, Program, in_order
from torchgpipe.schedule.simulation import changes

__all__ = ["KINDS", "PRICES", "Array", "Rehearsal", "rehearsal_of"]

Array: TypeAlias = npt.NDArray[np.float64]

KINDS = "FBIW"
_TRANSFER = len(KINDS)
PRICES = _TRANSFER + 1


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
        # Row 0 stands for the beginning of the step: what has nothing before it on its device follows this row.
        row: dict[Action, int] = {}
        self._last = last = [0] * len(program)
        #: For each action the row before it on its device, that on another device or 0, and the columns of its prices.
        self._rows: list[tuple[int, int, int, int]] = []
        for action, device, needed in in_order(program):
            # What it needs of its own device is before it there.
            foreign = next((one for one, is_foreign in needed if is_foreign), action)
            passage = max(foreign.j, action.j) * PRICES + _TRANSFER
            price = action.j * PRICES + KINDS.index(action.kind)
            self._rows.append((last[device], row.get(foreign, 0), passage, price))
            row[action] = last[device] = len(self._rows)
        self.partitions = [[j for j, place in enumerate(places) if place == device] for device in range(len(program))]
        self.held = [_held(own, partitions) for own, partitions in zip(program, self.partitions)]

    def seconds(self, prices: Array) -> Array:
        """Return the seconds of a step of each choice, given the prices of its partitions, [choices, n, prices]."""
        columns = list(np.ascontiguousarray(prices.reshape(len(prices), -1).T))
        ends = [np.zeros(len(prices))]
        for before, foreign, passage, price in self._rows:
            start = ends[before]
            if foreign:
                start = np.maximum(start, ends[foreign] + columns[passage])
            ends.append(start + columns[price])
        return np.asarray(np.max([ends[k] for k in self._last], axis=0))


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
