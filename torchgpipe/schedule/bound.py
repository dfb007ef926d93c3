"""A time that no program falls below, so that one that comes to it is the best there is.

On each device, with its limit of memory, no order avoids that

    | head | fill |     all actions of the device      | drain | tail |

- its first action waits until it is there (*head*), and what comes after its last one takes time (*tail*);
- before its first backward it can run no more forward than it has memory for (*fill*), and after its last forward no
  more backward than that of the cells that it holds (*drain*);
- each cell is held at least as long as the way from its partition to the loss and back, and all of them together for
  no more than the limit times the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchgpipe.schedule.work import FULL, Work

__all__ = ["least_time"]


def least_time(work: Work) -> float:
    """Return a time that no order of the actions falls below, in the units of ``work``."""
    heads, tails = _earliest(work), _earliest(work.reversed)[::-1]
    best = max([head + seconds for head, seconds in zip(heads, work.seconds)])
    #: The actions of each cell, the first of which is F.
    cells: dict[tuple[int, int], list[int]] = {}
    for a in range(len(work.device)):
        cells.setdefault((a % work.m, work.partition(a // work.m)), []).append(a)
    for device in set(work.device):
        own = [cell for cell in cells.values() if work.device[cell[0]] == device]
        memory = [work.rise[cell[0]] for cell in own]
        forward = [work.seconds[cell[0]] for cell in own]
        backward = [sum([work.seconds[a] for a in cell[1:]]) for cell in own]
        head, tail = min([heads[cell[0]] for cell in own]), min([tails[cell[-1]] for cell in own])
        fill = max(0.0, min([heads[cell[1]] for cell in own]) - head - _most(forward, memory))
        drain = max(0.0, min([tails[cell[0]] for cell in own]) - tail - _most(backward, memory))
        # If there is memory for all, both can be the same time.
        waits = max(fill, drain) if sum(memory) <= FULL else fill + drain
        lives = [heads[cell[-1]] + work.seconds[cell[-1]] - heads[cell[0]] for cell in own]
        held = sum([size * life for size, life in zip(memory, lives)])
        best = max(best, head + tail + max(held, waits + sum(forward) + sum(backward)))
    return best


def _earliest(work: Work) -> list[float]:
    """Return when each action could start if no device were ever busy."""
    starts = [0.0] * len(work.device)
    for a, needs in enumerate(work.needs):
        starts[a] = max([starts[b] + work.seconds[b] + transfer for b, transfer in needs], default=0.0)
    return starts


def _most(seconds: Sequence[float], memory: Sequence[float]) -> float:
    """Return the most time that cells can take which are held together."""
    return min(sum(seconds), max([time / size if size else float("inf") for time, size in zip(seconds, memory)]))
