"""When the weights of each partition are on their device, if they live in host memory: derived from a program.

A device has slots, each for the weights of one partition. Every action of a partition needs them: forward, backward
with its recomputation, and either half of backward. Where all slots are taken, the partition leaves whose next action
is farthest; this keeps uploads as few as can be (L. Belady, `A study of replacement algorithms
<https://doi.org/10.1147/sj.52.0078>`_, 1966). It leaves after its last action before that, so that its successor is
uploaded while other partitions compute. LayerMajor with five partitions on one device, two micro-batches and two slots:

    actions  F0F0F1F1F2F2F3F3F4b4F4b4b3b3b2b2b1b1b0b0
    a slot   0000222222224444444444442222222200000000    partitions, each from the time at which its upload can start
    another  111111113333333333333333333311111111....

Weights go up and never down, as they do not change during a step. Gradients stay on the device from the first backward
action of their partition to the last, and then go down once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from torchgpipe.schedule.action import Action, Program

__all__ = ["Residency", "Stay", "residency"]


class Stay(NamedTuple):
    """A time in which something of a partition is on its device. Actions are those of the device, from 0.

    Attributes:
        j: the partition
        after: the action after which its room is free, and its upload can start; -1 if that is so from the beginning
        first: the first action that needs it
        last: the last action that needs it; then it is freed
    """

    j: int
    after: int
    first: int
    last: int


class Residency(NamedTuple):
    """What comes to each device, and when it leaves.

    Attributes:
        weights: for each device, the stays of weights, in the order in which they are needed and uploaded
        gradients: for each device, the stays of gradients, which begin with their first action, in the order of their
            last actions, in which they go down
    """

    weights: list[list[Stay]]
    gradients: list[list[Stay]]

    @property
    def uploads(self) -> int:
        """The number of uploads of a partition's weights, on all devices."""
        return sum(map(len, self.weights))

    def bytes_up(self, weights: Sequence[int]) -> int:
        """Return the bytes that go to the devices, given the bytes of the weights of each partition."""
        return sum([weights[stay.j] for row in self.weights for stay in row])

    def bytes_down(self, gradients: Sequence[int]) -> int:
        """Return the bytes that come back, given the bytes of the gradients of each partition."""
        return sum([gradients[stay.j] for row in self.gradients for stay in row])


def residency(program: Program, slots: int | Sequence[int]) -> Residency:
    """Return which partitions' weights are on each device, with as few uploads as possible.

    Args:
        program: a list of actions for each device
        slots: the partitions whose weights have room on a device at a time, counted from the start of the upload; a
            number, or one for each device of the program

    Raises:
        ValueError: there is no slot.
    """
    each = (slots,) * len(program) if isinstance(slots, int) else tuple(slots)
    if min(each, default=1) < 1:
        raise ValueError(f"slots must be 1 or more, but got {slots}: an action needs the weights of its partition")
    return _residency(tuple([tuple(map(Action._make, row)) for row in program]), each)


@lru_cache(maxsize=32)  # Every step asks for that of its program.
def _residency(program: tuple[tuple[Action, ...], ...], slots: tuple[int, ...]) -> Residency:
    weights = [_weights(row, count) for row, count in zip(program, slots, strict=True)]
    return Residency(weights, list(map(_gradients, program)))


def _weights(actions: Sequence[Action], slots: int) -> list[Stay]:
    """Return the stays of the weights on one device."""
    following = _following(actions)
    never = len(actions)
    #: The stays that have begun, by partition.
    there: dict[int, Stay] = {}
    #: For each free slot, the last action of the partition that was there, or -1.
    free = [-1] * slots
    ended: list[Stay] = []
    for k, action in enumerate(actions):
        stay = there.pop(action.j, None)
        if stay is None:
            if not free:
                left = there.pop(max(there, key=lambda j: following[there[j].last]))
                ended.append(left)
                free.append(left.last)
            stay = Stay(action.j, free.pop(0), k, k)
        stay = stay._replace(last=k)
        if following[k] == never:
            ended.append(stay)
            free.append(k)
        else:
            there[action.j] = stay
    stays = sorted(ended, key=lambda stay: stay.first)
    # Uploads follow each other in the order in which they are needed, so that none waits for one that is needed later.
    starts = accumulate([stay.after for stay in stays], max)
    return [stay._replace(after=after) for stay, after in zip(stays, starts)]


def _following(actions: Sequence[Action]) -> list[int]:
    """Return for each action the next one of its partition, or the number of actions if it is the last one."""
    following, next_of = [len(actions)] * len(actions), dict[int, int]()
    for k in reversed(range(len(actions))):
        following[k] = next_of.get(actions[k].j, len(actions))
        next_of[actions[k].j] = k
    return following


def _gradients(actions: Sequence[Action]) -> list[Stay]:
    """Return the stays of the gradients on one device."""
    stays: dict[int, Stay] = {}
    for k, action in enumerate(actions):
        if action.kind not in ("F", "R"):
            began = stays.get(action.j)
            stays[action.j] = Stay(action.j, k - 1, k, k) if began is None else began._replace(last=k)
    return sorted(stays.values(), key=lambda stay: stay.last)
