"""The prices and the memory of every partition that could be: in any place, from any layer to any other.

Where a device has too little memory, some layers of a partition are recomputed. Which ones are best is a knapsack, too
slow for every partition, so the tables hold lower bounds of its answer, from the layers sorted in two ways:

    by bytes                  no set with fewer layers saves enough
    by seconds for each byte  no set is cheaper than the beginning of this list, its last layer taken in part
"""

from __future__ import annotations

import math

import numpy as np

from torchgpipe_balancing.planning.holding import Holding
from torchgpipe_balancing.planning.makespan import PRICES, TRANSFER, Array
from torchgpipe_balancing.planning.problem import Problem

__all__ = ["Tables"]


class Tables:
    """Prices and memory by partition, first layer, and end.

    Attributes:
        recomputes: whether layers may be recomputed
        holdings: for each device, what its partitions hold
        prices: lower bounds of the prices, [n, PRICES, start, end]; those of a partition that recomputes nothing, where
            that fits
        exact: where the prices are those of a partition that recomputes nothing
        excess: the least bytes by which a partition exceeds its device, if layers are recomputed where that helps, and
            nothing else is on the device; infinite where it would be empty, or leave too few layers to others
        bytes: what a partition takes if it recomputes nothing
        saved: for each layer, the bytes that recomputing it saves for each micro-batch
        extra: for each layer, the seconds that recomputing it adds to B
        may: for each layer, whether recomputing it is possible and saves anything
        counts: for each partition, the most micro-batches that it holds
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        layers, n = problem.layers, len(problem.places)
        size = len(layers)
        self.recomputes = problem.recomputes and not problem.splits_backward
        self.holdings = [Holding(problem.program, problem.places, d) for d in range(len(problem.devices))]
        self.saved = np.array([layer.kept - layer.input for layer in layers])
        self.extra = np.array([layer.forward + problem.cell["B"] for layer in layers])
        # The backward of the last layer follows its forward at once.
        self.may = (self.saved > 0) & (np.arange(size) < size - 1)

        def between(values: list[float]) -> Array:
            """Return the sum of the values from any start to any end, [start, end]."""
            sums = np.concatenate([[0.0], np.cumsum(values)])
            return np.asarray(np.maximum(sums[None, :] - sums[:, None], 0.0))

        work = [
            between([getattr(layer, name) for layer in layers]) for name in ("forward", "backward", "inputs", "weights")
        ]
        kept = between([layer.kept for layer in layers])
        kept[:-1] += np.array([layer.again for layer in layers])[:, None]
        waiting, state = between([layer.waiting for layer in layers]), between([layer.state for layer in layers])
        #: Bytes that each micro-batch keeps, bytes that wait besides, and bytes of state, by start and end.
        self.held = np.array([kept, waiting, state])
        self.prices = np.zeros((n, PRICES, size + 1, size + 1))
        self.excess = np.full((n, size + 1, size + 1), math.inf)
        needs = np.zeros_like(self.excess)
        self.bytes = np.zeros_like(self.excess)
        start, end = np.arange(size + 1)[:, None], np.arange(size + 1)[None, :]
        self.counts = np.ones(n)
        transfers = problem.latency + problem.per_byte * np.array([layer.crossing for layer in layers])
        for j, place in enumerate(problem.places):
            for kind, name in enumerate("FBIW"):
                self.prices[j, kind] = problem.cell[name] + work[kind]
            if j == 0:
                self.prices[j, 2] = 0.0
                self.prices[j, 3] = problem.cell["B"] + work[1]
            else:
                self.prices[j, TRANSFER, 1:] = transfers[:, None]
            self.prices[j, :TRANSFER] *= problem.devices[place].slowness
            holding = self.holdings[place]
            own = np.unique(holding.counts[:, holding.partitions.index(j)], axis=0)
            self.counts[j] = own[:, 0].max()
            held = np.max([count * kept + late * waiting for count, late in own], axis=0)
            self.bytes[j] = held + state
            needs[j] = self.bytes[j] - problem.devices[place].memory
            possible = (end > start) & (start >= j) & (end <= size - (n - 1 - j)) & ((start == 0) == (j == 0))
            possible &= (end == size) == (j == n - 1)
            self.excess[j] = np.where(possible, np.maximum(needs[j], 0.0), math.inf)
        self._plain = self.prices.copy()
        self.exact = (needs <= 0) | ~np.isfinite(self.excess)
        if self.recomputes and not self.exact.all():
            self._recompute(needs)

    @property
    def fits(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Where a partition fits its device, if it has the device for itself."""
        return self.excess <= 0

    def plain(self, j: int, start: int, end: int) -> Array:
        """Return the prices of a partition that recomputes nothing, in an array of its own."""
        return np.array(self._plain[j, :, start, end])

    def _recompute(self, needs: Array) -> None:
        """Raise the prices, and lower the excess, where something has to be recomputed."""
        problem = self.problem
        kept = np.array([layer.kept for layer in problem.layers])
        cell = problem.cell["F"]
        slow = [problem.devices[place].slowness for place in problem.places]
        for start in np.flatnonzero(~self.exact.all(axis=(0, 2))):
            own = start + np.flatnonzero(self.may[start:])
            ends = np.arange(start + 1, len(problem.layers) + 1)
            if not len(own):
                continue
            within = own[None, :] < ends[:, None]  # [end, layer]
            room = np.minimum.accumulate(kept[own])[np.maximum(within.sum(1) - 1, 0)]
            saved, extra = within * self.saved[own], within * self.extra[own]
            by_ratio = np.argsort(self.extra[own] / self.saved[own], kind="stable")
            by_bytes = np.argsort(-self.saved[own], kind="stable")
            by_kept = np.argsort(kept[own], kind="stable")
            ratio_saved, ratio_extra = saved[:, by_ratio].cumsum(1), extra[:, by_ratio].cumsum(1)
            bytes_saved, bytes_count = saved[:, by_bytes].cumsum(1), within[:, by_bytes].cumsum(1)
            kept_saved = saved[:, by_kept].cumsum(1)
            kept_room = np.where(within[:, by_kept], kept[own][by_kept], math.inf)
            rows = np.arange(len(ends))
            for j in range(len(slow)):
                need, count = needs[j, start, start + 1 :], self.counts[j]
                wants = ~self.exact[j, start, start + 1 :]
                if not wants.any():
                    continue
                least = np.minimum(0.0, (kept_room - count * kept_saved).min(1)) + need
                self.excess[j, start, start + 1 :][wants] = np.maximum(least, 0.0)[wants]
                fits = wants & (least <= 0)
                want = (need + room) / count

                def first(sums: Array, reach: Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
                    return np.asarray(np.minimum((sums < reach[:, None]).sum(1), sums.shape[1] - 1))

                at = first(ratio_saved, want)
                past = ratio_saved[rows, at] - want  # the last layer of the list is taken in part
                ratio = (self.extra[own] / self.saved[own])[by_ratio][at]
                by_part = ratio_extra[rows, at] - np.maximum(past, 0.0) * ratio
                number = np.maximum(bytes_count[rows, first(bytes_saved, want)], 1)
                self.prices[j, 0, start, start + 1 :] += np.where(fits, slow[j] * cell * number, 0.0)
                self.prices[j, 1, start, start + 1 :] += np.where(fits, slow[j] * np.maximum(by_part, 0.0), 0.0)
