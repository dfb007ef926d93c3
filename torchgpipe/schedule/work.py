"""The actions of a step as numbers, from which a program is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from statistics import fmean

from torchgpipe.schedule.action import Action, Kind, needs
from torchgpipe.schedule.simulation import Terms

__all__ = ["EPSILON", "FULL", "Links", "Work", "work_of"]

#: Times and memory that differ by less are equal, where actions take about 1, and the limit of a device is 1.
EPSILON = 1e-7
FULL = 1.0 + EPSILON

#: By action, other actions, and by how much the value between them comes later.
Links = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Work:
    """The actions of a step: F of all partitions, then I and W of each from the last; of each, all micro-batches.

    Attributes:
        m: the number of micro-batches
        n: the number of partitions
        device: by action, the index of its device
        seconds: the time that it takes, in units in which that is about 1
        rise: the memory that it takes at its start, as a share of its device's limit
        fall: the memory that it gives back at its end
        needs: the actions that it needs, which have lower numbers
    """

    m: int
    n: int
    device: Sequence[int]
    seconds: Sequence[float]
    rise: Sequence[float]
    fall: Sequence[float]
    needs: Links

    def partition(self, node: int) -> int:
        """Return the partition of a node."""
        halves = len(self.device) // (self.m * self.n) - 1
        return node if node < self.n else self.n - 1 - (node - self.n) // halves

    @cached_property
    def needed(self) -> Links:
        """By action, the actions that need it."""
        links: list[list[tuple[int, float]]] = [[] for _ in self.needs]
        for a, row in enumerate(self.needs):
            for b, late in row:
                links[b].append((a, late))
        return links

    @cached_property
    def reversed(self) -> Work:
        """The same with time running backwards, and actions counted from the last."""
        links = [[(len(self.needs) - 1 - a, late) for a, late in row] for row in reversed(self.needed)]
        return Work(self.m, self.n, self.device[::-1], self.seconds[::-1], self.fall[::-1], self.rise[::-1], links)


def work_of(
    m: int, places: Sequence[int], terms: Terms, limits: float | Sequence[float] | None, split: bool
) -> tuple[Work, list[Action], float]:
    """Return what the actions of a step take, the actions by their numbers, and the seconds of the unit of time.

    Raises:
        ValueError: a device cannot keep its limit. The message has the least limits.
    """
    n = len(places)
    halves: tuple[Kind, ...] = ("I", "W") if split else ("B",)
    nodes = [*[Action("F", 0, j) for j in range(n)], *[Action(k, 0, j) for j in reversed(range(n)) for k in halves]]
    actions = [node._replace(i=i) for node in nodes for i in range(m)]
    number = {action: a for a, action in enumerate(actions)}
    splits = {(action.i, action.j): split for action in actions}
    costs, rise, fall, links = list[float](), list[float](), list[float](), list[list[tuple[int, float]]]()
    for action in actions:
        unit, waits, more = terms.kept(action)
        # An R runs right before I or B, and does not wait for the gradient.
        early = terms.cost(Action("R", action.i, action.j)) if more and action.kind in "IB" else 0.0
        costs.append(early + terms.cost(action))
        rise.append({"F": unit, "I": waits + more, "B": more}.get(action.kind, 0.0))
        fall.append({"W": unit + waits + more, "B": unit + more}.get(action.kind, 0.0))
        links.append(
            [
                (number[other], 0.0 if places[other.j] == places[action.j] else terms.passage(other, action) - early)
                for other in needs(action, splits, n)
            ]
        )
    device = [places[action.j] for action in actions]
    rooms = _rooms(limits, _least_limits(m, device, rise, fall))
    scale = fmean(costs[::m]) or 1.0  # Of the first micro-batch, so that it is the same for any number of them.
    work = Work(
        m,
        n,
        device,
        [max(cost / scale, 10 * EPSILON) for cost in costs],  # What takes no time would tie with what needs it.
        [size / rooms[place] for size, place in zip(rise, device)],
        [size / rooms[place] for size, place in zip(fall, device)],
        [[(b, late / scale) for b, late in row] for row in links],
    )
    return work, actions, scale


def _least_limits(m: int, device: Sequence[int], rise: Sequence[float], fall: Sequence[float]) -> list[float]:
    """Return the most that each device keeps if micro-batches run one by one, in the order of the nodes."""
    least, held = [0.0] * (1 + max(device)), [0.0] * (1 + max(device))
    for a in [a for i in range(m) for a in range(i, len(device), m)]:
        held[device[a]] += rise[a]
        least[device[a]] = max(least[device[a]], held[device[a]])
        held[device[a]] -= fall[a]
    return least


def _rooms(limits: float | Sequence[float] | None, least: Sequence[float]) -> list[float]:
    rooms = [inf if limits is None else limits] * len(least) if not isinstance(limits, Sequence) else [*limits]
    if len(rooms) != len(least) or any(need > room * FULL for need, room in zip(least, rooms)):
        raise ValueError(f"limits must be {least} or more, what one micro-batch keeps on each device, but got {limits}")
    return [room or 1.0 for room in rooms]
