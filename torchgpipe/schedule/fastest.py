"""Make the fastest program for any placement, times and memory; without a solver, a thread or a random number.

    1. A pattern: when one micro-batch runs its actions, so that all can do the same, one after the other. Where
       partitions go round the devices, also 1F1B in groups of micro-batches.
    2. Sweeps over that order, until nothing idles that need not.
    3. So for a few stretches of the pattern, and slacks of the sweeps, with few micro-batches; with all for the best.

The placements, and the limits of memory under which published programs are met, are those of P. Qi et al., `Pipeline
Parallelism with Controllable Memory <https://arxiv.org/abs/2405.15362>`_, 2024, whose patterns are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from torchgpipe.schedule.action import Action
from torchgpipe.schedule.bound import least_time
from torchgpipe.schedule.pattern import shortest_pattern
from torchgpipe.schedule.simulation import COSTS, Costs, Memory, Terms, Transfer
from torchgpipe.schedule.sweep import Arrangement, improved, in_groups, in_turn
from torchgpipe.schedule.work import EPSILON, Work, work_of

__all__ = ["fastest"]

#: What is tried: the stretch of the pattern, and the slacks of the sweeps, where actions take about 1.
_STRICT, _WARM, _HOT = (0.0,) * 3, (1.0, 1.0, 0.5, 0.0, 0.0), (2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0)
_TRIES = (
    *((0.0, _STRICT), (1.0, _HOT), (2.0, _WARM), (0.5, _HOT), (0.0, (1.0, 0.5, 0.0))),
    *((2.0, _HOT), (1.0, _WARM), (0.5, _WARM), (0.0, _WARM), (0.5, _STRICT)),
)
#: The same of groups, which have no stretch.
_GROUPS = ((None, _STRICT), (None, _HOT))

#: Orders are tried with about so many actions or more; of large programs fewer, but not fewer than so many.
_FEW, _ACTIONS, _FEWEST = 700, 40_000, 4

#: A time that so many tries come to is taken for the shortest.
_AGREEING = 3


def fastest(
    m: int,
    places: Sequence[int],
    costs: Costs = COSTS,
    memory: Memory | None = None,
    *,
    limits: float | Sequence[float] | None = None,
    waiting: Memory | None = None,
    recomputed: Memory | None = None,
    transfer: Transfer = 0.0,
    split: bool = True,
) -> list[list[Action]]:
    """Return the program with the shortest step that is found; the same on every machine. ::

        from torchgpipe.schedule import fastest

        program = fastest(8, [0, 1, 1, 0], {"F": 1, "I": 1.2, "W": 0.8}, limits=3, transfer=0.1)

    Args:
        m: the number of micro-batches
        places: the index of the device of each partition
        costs: as for :func:`simulate`
        memory: as for :func:`simulate`
        limits: the most that each device may keep, in the units of ``memory``: a number for all, or one for each
            (default: no limit)
        waiting: as for :func:`simulate`
        recomputed: as for :func:`simulate`; where it is more than 0, a cell is recomputed. The program has no R: a
            pipeline adds it before I or B, where it does not wait for the gradient
        transfer: as for :func:`simulate`
        split: whether backward is split into I and W

    Raises:
        ValueError: a device cannot keep its limit. The message has the least limits.
    """
    terms = Terms(costs, memory, waiting, recomputed, transfer)
    work, actions, _ = work_of(m, places, terms, limits, split)

    @cache
    def least(count: int) -> float:
        return least_time(of_first(count)) + EPSILON

    @cache
    def of_first(count: int) -> Work:
        return work if count == m else work_of(count, places, terms, limits, split)[0]

    @cache
    def tried(k: int, count: int) -> Arrangement:
        stretch, slacks = tries[k]
        begun = in_groups(of_first(count)) if stretch is None else None
        begun = begun or in_turn(of_first(count), *pattern(stretch or 0.0))
        return improved(of_first(count), begun, slacks, least(count))

    @cache
    def pattern(stretch: float) -> tuple[list[float], float]:
        return shortest_pattern(work, stretch)

    nodes, lap = len(actions) // m, 2 * (1 + max(places))
    few = min(m, lap * max(1, _FEW // (nodes * lap)))  # Groups of as many micro-batches as there are devices.
    tries = [*_GROUPS * (in_groups(work) is not None), *_TRIES[: max(_FEWEST, _ACTIONS // (few * nodes))]]
    made = _best(tried, least, m, few, len(tries))
    return [[actions[a] for a in row] for row in made.rows]


def _best(
    tried: Callable[[int, int], Arrangement], least: Callable[[int], float], m: int, few: int, tries: int
) -> Arrangement:
    """Try orders with few micro-batches, and return the best with all.

    Args:
        tried: makes an order, by number, of so many micro-batches
        least: returns a time that no order of so many micro-batches falls below
        m: the number of micro-batches
        few: how many to try with
        tries: how many orders to try
    """
    times: list[float] = []
    for k in range(tries):
        times.append(round(tried(k, few).seconds, 6))  # Versions of Python round sums in different ways.
        if tried(k, few).seconds <= least(few) and (made := tried(k, m)).seconds <= least(m):
            return made
        alike = [other for other, seconds in enumerate(times) if seconds <= min(times) + EPSILON]
        if len(alike) == _AGREEING:
            return tried(alike[0], m)
    more = min(m, few + few // 2)

    def expected(k: int) -> float:
        """Return the time of all micro-batches, given how it grows."""
        return round(times[k] + (tried(k, more).seconds - times[k]) / max(1, more - few) * (m - few), 6)

    ranked = sorted(sorted(range(len(times)), key=times.__getitem__)[:3], key=expected)
    return min([tried(k, m) for k in ranked[:2]], key=lambda made: round(made.seconds, 6))
