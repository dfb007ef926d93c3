"""Choose the layers that are recomputed, so that a balance fits its devices at the least cost.

For a partition that has its device for itself this is a knapsack: save the bytes that are missing, with few layers
(each adds a cell to F) and few seconds (which B takes besides). All answers are kept of which no other has both fewer
layers and fewer seconds. Three facts keep their number small:

- Of layers that are alike in bytes, the quickest come first.
- Layers are offered in the order of the room that they need while they are recomputed. So once a set saves enough,
  no later layer makes it better.
- A set is dropped if another one saves no less, with no more layers and no more seconds.

Partitions that share a device share its memory, too. There layers are given back one by one, the most costly first,
from the set that saves the most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from torchgpipe_balancing.planning.makespan import Array
from torchgpipe_balancing.planning.tables import Tables

__all__ = ["MOST", "Answer", "answers", "least_excess", "shared"]

#: So many sets of a knapsack are kept. If there are more, some are dropped, and the answers may not be the best.
MOST = 600


class Answer(NamedTuple):
    """A set of layers to recompute.

    Attributes:
        layers: their positions
        seconds: that B takes besides; F takes a cell for each of them
    """

    layers: frozenset[int]
    seconds: float


def answers(tables: Tables, j: int, start: int, end: int) -> tuple[list[Answer], bool]:
    """Return the best sets of layers of a partition that has its device for itself, and whether they are proven.

    It has to fit, with some layers recomputed if need be.
    """
    if tables.exact[j, start, end]:
        return [Answer(frozenset(), 0.0)], True
    problem, count = tables.problem, tables.counts[j]
    cost = problem.partition_cost(j, start, end)
    need = count * cost.kept + cost.state - problem.devices[problem.places[j]].memory
    kept = [layer.kept for layer in problem.layers]
    # Alike in bytes, and the quickest first.
    own = sorted(
        [int(k) for k in range(start, end) if tables.may[k]],
        key=lambda k: (kept[k], tables.saved[k], tables.extra[k], k),
    )
    groups = [list(group) for _, group in groupby(own, key=lambda k: (kept[k], tables.saved[k]))]
    left = np.cumsum([0.0, *[tables.saved[k] for k in reversed(own)]])[::-1]  # what the layers from here on save
    # A set is a row: the bytes that it saves, its layers, its seconds; beside it how many of each group it has.
    sets, taken = np.zeros((1, 3)), np.zeros((1, 0), dtype=np.int64)
    found: list[tuple[int, float, Array]] = []
    proven, passed = True, 0
    for group in groups:
        steps = np.zeros((len(group) + 1, 3))
        steps[1:] = np.cumsum([[tables.saved[k], 1.0, tables.extra[k]] for k in group], axis=0)
        sets = (sets[:, None, :] + steps[None, :, :]).reshape(-1, 3)
        number = np.tile(np.arange(len(steps)), len(taken))[:, None]
        taken = np.concatenate([np.repeat(taken, len(steps), axis=0), number], axis=1)
        enough = (count * sets[:, 0] >= need + kept[group[0]]) & (number[:, 0] > 0)
        for row in np.flatnonzero(enough):
            found.append((int(sets[row, 1]), float(sets[row, 2]), taken[row]))
        found = _frontier(found)
        passed += len(group)
        # The next group needs more room still.
        room = kept[own[passed]] if passed < len(own) else 0.0
        keep = ~enough & (count * (sets[:, 0] + left[passed]) >= need + room)
        for layers, seconds, _ in found:
            keep &= (sets[:, 1] < layers) | (sets[:, 2] < seconds)
        sets, taken = sets[keep], taken[keep]
        best = _undominated(sets)
        if len(best) > MOST:
            proven = False
            best = best[np.linspace(0, len(best) - 1, MOST).astype(np.int64)]
        sets, taken = sets[best], taken[best]
        if not len(sets):
            break
    if not found:  # Sets were dropped that lead to the only one that fits.
        some, _ = shared(tables, problem.places[j], [(start, end)])
        return [Answer(some, math.fsum(tables.extra[k] for k in some))], False
    return [
        Answer(frozenset(k for group, number in zip(groups, row) for k in group[:number]), seconds)
        for _, seconds, row in found
    ], proven


def _frontier(found: list[tuple[int, float, Array]]) -> list[tuple[int, float, Array]]:
    """Return those with fewer seconds than all with as many layers, or fewer."""
    best: list[tuple[int, float, Array]] = []
    for one in sorted(found, key=lambda one: one[:2]):
        if not best or one[1] < best[-1][1]:
            best.append(one)
    return best


def _undominated(sets: Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the rows of which no other saves as much with as few layers and seconds; the most bytes first."""
    if not len(sets):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((sets[:, 2], sets[:, 1], -sets[:, 0]))
    layers = sets[order, 1].astype(np.int64)
    least = np.full((len(sets) + 1, int(layers.max()) + 1), math.inf)
    least[np.arange(1, len(sets) + 1), layers] = sets[order, 2]
    # least[row, count]: the least seconds of the rows before, with so many layers or fewer
    least = np.minimum.accumulate(np.minimum.accumulate(least, axis=0), axis=1)
    return np.asarray(order[least[np.arange(len(sets)), layers] > sets[order, 2]])


def _moments(tables: Tables, device: int, spans: Sequence[tuple[int, int]]) -> tuple[Array, Array, list[int], Array]:
    """Return the bytes over the limit at each moment if nothing is recomputed, and what each layer saves then."""
    problem, holding = tables.problem, tables.holdings[device]
    kept, waiting, state = np.array([tables.held[:, start, end] for start, end in spans]).T
    over = holding.counts[..., 0] @ kept + holding.counts[..., 1] @ waiting
    over += state.sum() - problem.devices[device].memory
    own = [
        (k, column) for column, span in enumerate(spans) for k in range(*span) if tables.recomputes and tables.may[k]
    ]
    layers = [k for k, _ in own]
    saves = holding.counts[:, [column for _, column in own], 0] * tables.saved[layers]
    return over, saves, layers, np.array([problem.layers[k].kept for k in layers])


def least_excess(tables: Tables, device: int, spans: Sequence[tuple[int, int]]) -> tuple[float, frozenset[int]]:
    """Return the least bytes over the limit of a device, negative if there are some left, and the recomputed layers.

    Args:
        tables: the tables of the problem
        device: the device
        spans: for each of its partitions, its first layer and its end
    """
    over, saves, layers, kept = _moments(tables, device, spans)
    least, best = float(over.max()), frozenset[int]()
    if not layers:
        return least, best
    # Whatever needs no more room than the largest layer of the set is recomputed, too.
    order = np.argsort(kept, kind="stable")
    rest = (over[:, None] - saves[:, order].cumsum(1)).max(0) + kept[order]
    at = int(rest.argmin())
    if rest[at] < least:
        least, best = float(rest[at]), frozenset(layers[k] for k in order[: at + 1])
    return least, best


def shared(tables: Tables, device: int, spans: Sequence[tuple[int, int]]) -> tuple[frozenset[int], bool]:
    """Return layers to recompute so that the partitions of a device fit together, and whether no set can be better.

    They have to fit, with some layers recomputed if need be.
    """
    over, saves, layers, kept = _moments(tables, device, spans)
    if (over <= 0).all():
        return frozenset(), True
    order = np.argsort(kept, kind="stable")
    extra = tables.extra[layers]
    rest = (over[:, None] - saves[:, order].cumsum(1)).max(0) + kept[order]
    best, least = frozenset[int](), math.inf
    enough = np.flatnonzero(rest <= 0)
    for at in enough[np.unique(np.linspace(0, len(enough) - 1, 8).astype(np.int64))]:
        chosen = order[: at + 1]
        room = kept[order[at]]
        excess = over - saves[:, chosen].sum(1) + room
        back = []
        # Give back what costs the most for the bytes that it saves, as long as the rest fits.
        weights = np.maximum(saves[:, chosen].max(0), 1e-300)
        for k in chosen[np.argsort(-extra[chosen] / weights, kind="stable")]:
            if (excess + saves[:, k] <= 0).all():
                excess = excess + saves[:, k]
                back.append(int(k))
        stays = [int(k) for k in chosen if int(k) not in back]
        seconds = math.fsum(extra[stays])
        if seconds < least:
            best, least = frozenset(layers[k] for k in stays), seconds
    return best, False
