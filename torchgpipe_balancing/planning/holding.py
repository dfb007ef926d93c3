"""The memory of a device, as far as the program decides it: how many micro-batches its partitions hold at once.

The most bytes that a device holds are the largest of a few sums, one for each moment of its program at which no count
is below that of another moment:

    sum of  count * kept  +  count between I and W * waiting     over its partitions
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchgpipe.schedule import Program
from torchgpipe.schedule.simulation import changes
from torchgpipe_balancing.planning.makespan import Array

__all__ = ["Holding"]


class Holding:
    """What the partitions of a device hold.

    Attributes:
        partitions: the partitions of the device
        counts: for each moment, of each of these partitions the micro-batches from F to B or W, and from I to W;
            [moments, partitions, 2]
    """

    def __init__(self, program: Program, places: Sequence[int], device: int) -> None:
        self.partitions = [j for j, place in enumerate(places) if place == device]
        column = {j: k for k, j in enumerate(self.partitions)}
        steps = np.zeros((2 * len(program[device]) + 1, len(column), 2))
        units = [1.0] * len(places)
        for row, action in enumerate(program[device]):
            for half in (0, 1):
                both = changes(action, units, units)[half]
                kept = changes(action, units, None)[half]
                steps[2 * row + half + 1, column[action.j]] = kept, both - kept
        moments = np.unique(np.cumsum(steps, axis=0), axis=0)
        flat = moments.reshape(len(moments), -1)
        largest = [k for k, own in enumerate(flat) if not ((flat >= own).all(1) & (flat > own).any(1)).any()]
        self.counts: Array = moments[largest]

    @property
    def is_lone(self) -> bool:
        """Whether the device has one partition only, so that nothing else takes of its memory."""
        return len(self.partitions) == 1

    def most(self, kept: Array, waiting: Array) -> Array:
        """Return the most bytes, for what each partition keeps for a micro-batch; [..., partitions] to [...]."""
        held = np.tensordot(kept, self.counts[..., 0], (-1, -1)) + np.tensordot(waiting, self.counts[..., 1], (-1, -1))
        return np.asarray(held.max(axis=-1))
