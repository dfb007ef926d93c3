"""The actions of one micro-batch at times that repeat: the order that a generated program starts from.

Each action starts as soon as what it needs is there and its device is free *modulo a period*, so that micro-batch i can
do the same i periods later. Three devices and a period of four, where each action takes one:

    time      0  1  2  3  4  5  6         modulo 4
    device 0  F  .  .  .  .  I  W         F  I  W  .
    device 1     F  .  .  I  .  W         I  F  W  .
    device 2        F  I  W               W  .  F  I

In the steady state a device holds as many micro-batches as there are periods between F and W. So a longer period holds
fewer, and the shortest one that keeps the limits is taken. With a *stretch*, values wait at boundaries: devices hold
more, and disturb each other less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from torchgpipe.schedule.work import EPSILON, FULL, Work

__all__ = ["shortest_pattern"]

#: The periods that are tried, as multiples of the work of the busiest device.
_PERIODS = (*[1.0 + k / 32 for k in range(32)], *[2.0 * 1.25**k for k in range(24)])


class _Node(NamedTuple):
    """An action of all micro-batches: the mean of their times, and the most of their memory; see `Work`."""

    device: int
    seconds: float
    rise: float
    fall: float
    needs: Sequence[tuple[int, float]]


def shortest_pattern(work: Work, stretch: float) -> tuple[list[float], float]:
    """Return when each node starts, and the period.

    Args:
        work: the actions of a step
        stretch: how long values wait at boundaries, as a share of the time in which they were computed
    """
    nodes = _nodes(work)
    # What nobody needs, W, takes the gaps that the others leave.
    order = sorted(range(len(nodes)), key=lambda k: not work.needed[k * work.m])
    devices = {node.device for node in nodes}
    busiest = max([sum([node.seconds for node in nodes if node.device == device]) for device in devices])
    for period in [share * busiest for share in _PERIODS if busiest]:
        starts = _pattern(nodes, order, period, stretch)
        if starts and all(_peak(nodes, starts, period, device) <= FULL for device in devices):
            return starts, period
    # One micro-batch at a time, with W at once, takes the least memory.
    period = sum([node.seconds + sum([abs(late) for _, late in node.needs]) for node in nodes]) or 1.0
    return _pattern(nodes, range(len(nodes)), period, 0.0) or [], period


def _nodes(work: Work) -> list[_Node]:
    nodes, kept = list[_Node](), [0.0] * work.n
    for k, a in enumerate(range(0, len(work.device), work.m)):
        each, j = slice(a, a + work.m), work.partition(k)
        kept[j] += max(work.rise[each])
        # A partition gives back all that it takes.
        fall = kept[j] if any(work.fall[each]) else 0.0
        needs = [(pairs[0][0] // work.m, fmean([late for _, late in pairs])) for pairs in zip(*work.needs[each])]
        nodes.append(_Node(work.device[a], fmean(work.seconds[each]), max(work.rise[each]), fall, needs))
    return nodes


def _pattern(nodes: Sequence[_Node], order: Iterable[int], period: float, stretch: float) -> list[float] | None:
    """Return when each node starts; None if a device has no gap in the period that is wide enough."""
    starts = [0.0] * len(nodes)
    #: For each device, the starts of its nodes, and what they take.
    taken: dict[int, list[tuple[float, float]]] = {}
    for k in order:
        device, seconds, *_, needs = nodes[k]
        ready, busy = 0.0, taken.setdefault(device, [])
        for other, late in needs:
            waits = stretch * nodes[other].seconds if nodes[other].device != device else 0.0
            ready = max(ready, starts[other] + nodes[other].seconds + late + waits)
        ends = [ready + max(0.0, _modulo(start + length - ready, period)) for start, length in busy]
        fits = (start for start in sorted([ready, *ends]) if _is_free(start, seconds, busy, period))
        starts[k] = next(fits, -1.0)
        if starts[k] < 0.0:
            return None
        busy.append((starts[k], seconds))
    return starts


def _is_free(start: float, seconds: float, busy: Sequence[tuple[float, float]], period: float) -> bool:
    return all(
        _modulo(start - other, period) + 2 * EPSILON >= length
        and _modulo(other - start, period) + 2 * EPSILON >= seconds
        for other, length in busy
    )


def _modulo(time: float, period: float) -> float:
    """Return a time modulo a period; one that is a period but for rounding is about 0."""
    return (time + EPSILON) % period - EPSILON


def _peak(nodes: Sequence[_Node], starts: Sequence[float], period: float, device: int) -> float:
    """Return the most memory that a device holds in the steady state."""
    changes = [
        change
        for node, start in zip(nodes, starts)
        if node.device == device
        for change in ((start, node.rise), (start + node.seconds, -node.fall))
    ]
    return max(
        [
            sum([size * ((time - other + EPSILON) // period + 1) for other, size in changes])
            for time, rise in changes
            if rise > 0
        ],
        default=0.0,
    )
