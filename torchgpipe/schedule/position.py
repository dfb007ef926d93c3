"""Where a program is at one of its actions: which action of its device it is, and what the device holds by then."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torchgpipe.schedule.action import Action, Program
from torchgpipe.schedule.simulation import simulate

__all__ = ["Position", "at_once", "position_of"]


class Position(NamedTuple):
    """The place of an action, and what its device holds while the action runs, which is what `simulate` counts.

    Attributes:
        device: the index of the device
        number: the number of the action among those of the device, from 1
        total: how many actions the device has
        held: the cells (i, j) from the start of F to the end of B or W, in the order of their F
        most: the most cells that the device ever holds at once
    """

    device: int
    number: int
    total: int
    held: list[tuple[int, int]]
    most: int


def position_of(program: Program, action: Action) -> Position:
    """Return the position of an action of a program that can run."""
    device = next(k for k, own in enumerate(program) if action in own)
    own = [Action._make(one) for one in program[device]]
    number = own.index(action) + 1
    ended = {(i, j) for kind, i, j in own[: number - 1] if kind in "BW"}
    held = [(i, j) for kind, i, j in own[:number] if kind == "F" and (i, j) not in ended]
    return Position(device, number, len(own), held, int(simulate(program).peaks[device]))


def at_once(program: Program) -> set[tuple[int, int]]:
    """Return the cells whose backward follows their forward on their device: a step does not recompute them."""
    return {(i, j) for own in program for (kind, i, j), after in pairwise(own) if kind == "F" and after[1:] == (i, j)}
