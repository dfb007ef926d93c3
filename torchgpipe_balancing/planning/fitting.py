"""The memory of a device: by how much its partitions exceed it, and which layers to recompute so that they fit.

What the partitions of a device hold is the largest of a few sums, one for each moment that counts. A recomputed layer
saves bytes at each of them, and costs its forward and two cells. While one layer comes back, the device needs room for
it, so the largest of the recomputed layers counts once more.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torchgpipe_balancing.planning.problem import Problem
from torchgpipe_balancing.planning.rehearsal import Array, Rehearsal

__all__ = ["Fitting", "Span"]

Positions: TypeAlias = npt.NDArray[np.int64]

#: The first layer of a partition, and its end.
Span: TypeAlias = tuple[int, int]

_BYTES = ("kept", "waiting", "state")

#: So many sizes of the largest recomputed layer are tried at most.
_ROOMS = 3


class Fitting:
    """The memory of the devices of a problem.

    Args:
        problem: the problem
        rehearsal: its program

    Attributes:
        excess: returns the fewest bytes by which some partitions exceed the memory of a device, given the index of the
            device and the layers of its partitions; below 0 if some are left
    """

    def __init__(self, problem: Problem, rehearsal: Rehearsal) -> None:
        layers, cell = problem.layers, problem.cell
        self._limits = [device.memory for device in problem.devices]
        self._held = rehearsal.held
        self._sums = [list(accumulate([getattr(one, name) for one in layers], initial=0.0)) for name in _BYTES]
        self._again = [one.again for one in layers]
        self._kept = np.array([one.kept for one in layers])
        self._saved = np.array([one.kept - one.input for one in layers])
        self._cost = np.array([one.forward + cell.forward + cell.backward for one in layers])
        # The backward of the last layer follows its forward at once.
        may = (self._saved > 0) & (np.arange(len(layers)) < len(layers) - 1)
        by_kept = np.argsort(self._kept, kind="stable")
        self._may = by_kept[may[by_kept] & (problem.recomputes and not problem.splits_backward)]
        self.excess = cache(self._excess)

    def _excess(self, device: int, spans: tuple[Span, ...]) -> float:
        over = self._over(device, spans)
        least = float(over.max())
        if least <= 0:
            return least
        layers, saves = self._savings(device, spans)
        return min(least, float(self._rest(over, layers, saves).min(initial=math.inf)))

    def recomputed(self, device: int, spans: tuple[Span, ...]) -> frozenset[int]:
        """Return layers to recompute so that the partitions fit, at little cost; or else with the least excess."""
        over = self._over(device, spans)
        if over.max() <= 0:
            return frozenset()
        layers, saves = self._savings(device, spans)
        rest = self._rest(over, layers, saves)
        enough = np.flatnonzero(rest <= 0)
        if not len(enough):
            helps = len(layers) and rest.min() < over.max()
            return frozenset(layers[: int(rest.argmin()) + 1].tolist() if helps else ())
        found = []
        for at in enough[np.unique(np.linspace(0, len(enough) - 1, _ROOMS).astype(np.int64))]:
            cost = self._cost[layers[: at + 1]]
            chosen = _cheap(over + self._kept[layers[at]], saves[:, : at + 1], cost)
            found.append((float(cost[chosen].sum()), layers[chosen]))
        return frozenset(min(found, key=lambda one: one[0])[1].tolist())

    def _over(self, device: int, spans: tuple[Span, ...]) -> Array:
        """Return the bytes over the limit at each moment if nothing is recomputed."""
        kept, waiting, state = ([own[end] - own[start] for start, end in spans] for own in self._sums)
        both = [[one + self._again[span[0]], late] for one, late, span in zip(kept, waiting, spans)]
        held: Array = (self._held[device] * both).sum((1, 2))
        return np.asarray(held + (sum(state) - self._limits[device]))

    def _savings(self, device: int, spans: tuple[Span, ...]) -> tuple[Positions, Array]:
        """Return the layers that may be recomputed, that with the fewest bytes first, and what each saves by moment."""
        own = self._may
        column = np.full(len(own), -1)
        for k, (start, end) in enumerate(spans):
            column[(own >= start) & (own < end)] = k
        layers = own[column >= 0]
        return layers, self._held[device][:, column[column >= 0], 0] * self._saved[layers]

    def _rest(self, over: Array, layers: Positions, saves: Array) -> Array:
        """Return the excess if the layers up to each one are recomputed, which needs the room of that layer."""
        return np.asarray((over[:, None] - saves.cumsum(1)).max(0) + self._kept[layers])


def _cheap(over: Array, saves: Array, cost: Array) -> Positions:
    """Return the positions of layers that save as much as is over, at little cost; all together save enough.

    Take those with the most bytes for a second, where it lacks most; then leave out what is not needed after all, the
    costliest first.
    """
    order = np.argsort(-saves[int(over.argmax())] / np.maximum(cost, 1e-300), kind="stable")
    count = 1 + int((saves[:, order].cumsum(1) >= over[:, None]).all(0).argmax())
    chosen = order[:count].tolist()
    spare = saves[:, chosen].sum(1) - over
    for k in sorted(chosen, key=lambda k: -cost[k]):
        if (saves[:, k] <= spare).all():
            spare = spare - saves[:, k]
            chosen.remove(k)
    return np.asarray(chosen)
