"""Take idle time out of an order of actions, forwards and backwards in time.

A sweep runs the lists of the devices. Where a device would wait, it runs the first later action of its list that can
start, ends before the next of the list would start, and has memory. Then the same backwards in time, which moves to the
end what need not be early. A sweep on paper of device 0, which waits for the gradient of micro-batch 0:

    its list    F0 F1 F2 I0 W0 I1 W1 I2 W2           before    F0F1F2....I0W0I1W1I2W2
    swept       F0 F1 F2 F3 I0 ...                   after     F0F1F2F3..I0..

A sweep makes no step longer, unless it has *slack*: then a filler may delay the next action by so much, which leads out
of orders that no single move makes better. Each sweep runs what it returns, so no order can deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from torchgpipe.schedule.work import EPSILON, FULL, Work

__all__ = ["Arrangement", "improved", "in_groups", "in_turn"]


class Arrangement(NamedTuple):
    """An order of all actions that keeps the limits.

    Attributes:
        rows: for each device, its actions
        starts: by action, when it starts
        seconds: when the last action ends
    """

    rows: list[list[int]]
    starts: Sequence[float]
    seconds: float

    def reversed(self, work: Work) -> Arrangement:
        """Return the same with time running backwards."""
        last = len(self.starts) - 1
        rows = [[last - a for a in row[::-1]] for row in self.rows]
        starts = [self.seconds - start - seconds for start, seconds in zip(self.starts, work.seconds)]
        return Arrangement(rows, starts[::-1], self.seconds)


def arranged(work: Work, starts: Sequence[float]) -> Arrangement:
    """Return the order of actions that start at such times."""
    rows: list[list[int]] = [[] for _ in range(1 + max(work.device))]
    for a in sorted(range(len(starts)), key=starts.__getitem__):
        rows[work.device[a]].append(a)
    return Arrangement(rows, starts, 0.0)


def in_turn(work: Work, starts: Sequence[float], period: float) -> Arrangement:
    """Return the order in which all micro-batches do the same, a period after each other.

    Args:
        work: the actions
        starts: for each node, its start
        period: the time from a micro-batch to the next
    """
    return arranged(work, [start + i * period for start in starts for i in range(work.m)])


def in_groups(work: Work) -> Arrangement | None:
    """Return forward and backward in turn, each of as many micro-batches of a partition as there are devices.

    A device has forward and backward of a micro-batch in each unit of time, and backward begins on the last device
    right after the first forward of the last partition. Here device 0 of two, with partitions 0 and 2, as (i, j)::

        F(0,0) F(1,0) F(0,2) F(1,2) B(0,2) F(2,0) B(1,2) F(3,0) B(0,0) F(2,2) B(1,0) F(3,2) ...

    That is 1F1B of one partition for each device, and its interleaved kind of several, in the memory of 1F1B: of
    X. Wan et al., `PipeOffload <https://arxiv.org/abs/2503.01328>`_, 2025.

    Returns:
        None if partitions do not go round the devices, or a device has no memory for it
    """
    m, n, d = work.m, work.n, 1 + max(work.device)
    if n % d or any(work.device[k * m] != k % d for k in range(n)):
        return None
    means = [fmean(work.seconds[a : a + m]) for a in range(0, len(work.device), m)]
    forward = max(means[:n])
    unit = forward + sum(means[n:]) / n
    starts = list[float]()
    for k in range(len(means)):
        j = work.partition(k)
        turn, passed = divmod(j if k < n else n - 1 - j, d)
        begun = passed * forward if k < n else unit * (n - d) + d * forward + passed * (unit - forward)
        # Rounded, as versions of Python round sums in different ways. Of equal times, what others need comes first.
        starts += [round(begun + unit * (i // d * n + turn * d + i % d), 6) for i in range(m)]
    made = arranged(work, starts)
    held = [accumulate([change for a in row for change in (work.rise[a], -work.fall[a])]) for row in made.rows]
    return made if max(map(max, held)) <= FULL else None


def improved(work: Work, made: Arrangement, slacks: Sequence[float], least: float) -> Arrangement:
    """Sweep forwards, backwards, forwards, and so on.

    Args:
        work: the actions
        made: the order to begin with
        slacks: those of the sweeps, an odd number of them, so that the last one is forwards
        least: a time that no order falls below
    """
    for k, slack in enumerate(slacks):
        if k:
            made = made.reversed(work if k % 2 else work.reversed)
        made = _swept(work.reversed if k % 2 else work, made, slack)
        if made.seconds <= least:
            return made.reversed(work.reversed) if k % 2 else made
    return made


def _swept(work: Work, made: Arrangement, slack: float) -> Arrangement:
    """Return an order without some of the time in which devices wait."""
    m, device, seconds, rise, fall = work.m, work.device, work.seconds, work.rise, work.fall
    missing = [len(needs) for needs in work.needs]
    ready, starts = [0.0] * len(device), [-1.0] * len(device)
    d = len(made.rows)
    #: For each device: the place in its list, when it is free, the memory that it holds.
    places, free, held = [0] * d, [0.0] * d, [0.0] * d
    rows: list[list[int]] = [[] for _ in range(d)]
    position = [0] * len(device)
    #: For each device, by node, the next action: micro-batches stay in their order.
    following: list[dict[int, int]] = [{} for _ in range(d)]
    for row, nexts in zip(made.rows, following):
        for place, a in enumerate(row):
            position[a] = place
            nexts.setdefault(a // m, a)

    def filler(k: int, now: float, end: float) -> int:
        """Return what device ``k`` can run from now until the end; -1 if there is nothing."""
        chosen, place = -1, len(made.rows[k])
        for a in following[k].values():
            if missing[a] or ready[a] > now + EPSILON or now + seconds[a] > end or position[a] > place:
                continue
            if held[k] + rise[a] <= FULL and (rise[a] <= fall[a] or has_room(k, a)):
                chosen, place = a, position[a]
        return chosen

    def has_room(k: int, filling: int) -> bool:
        """Return whether what stands before an action in its list has room after it as well."""
        level = held[k] + rise[filling] - fall[filling]
        for a in made.rows[k][places[k] : position[filling]]:
            if starts[a] < 0.0:
                if level + rise[a] > FULL:
                    return False
                level += rise[a] - fall[a]
        return True

    events = [(0.0, k) for k in range(d)]
    while events:
        now, k = heapq.heappop(events)
        row = made.rows[k]
        while places[k] < len(row) and starts[row[places[k]]] >= 0.0:
            places[k] += 1
        if free[k] > now + EPSILON or places[k] == len(row):
            continue
        a = row[places[k]]
        if missing[a] or ready[a] > now + EPSILON:
            a = filler(k, now, (made.starts[a] if missing[a] else ready[a]) + slack + EPSILON)
            if a < 0:
                continue
        starts[a], free[k] = now, now + seconds[a]
        held[k] += rise[a] - fall[a]
        rows[k].append(a)
        node, after = a // m, a + 1
        if after // m == node:
            following[k][node] = after
        else:
            del following[k][node]
        heapq.heappush(events, (free[k], k))
        for b, transfer in work.needed[a]:
            missing[b] -= 1
            ready[b] = max(ready[b], free[k] + transfer)
            if not missing[b] and (device[b] != k or ready[b] > free[k]):
                heapq.heappush(events, (max(now, ready[b]), device[b]))
    return Arrangement(rows, starts, max(free))
