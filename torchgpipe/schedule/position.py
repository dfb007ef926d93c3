"""Where a program is at one of its actions: which action of its device it is, and what the device holds by then."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from torchgpipe.schedule.action import Action, Program
from torchgpipe.schedule.simulation import simulate

__all__ = ["Position", "at_once", "in_one_piece", "peak_of", "position_of"]


class Position(NamedTuple):
    """The place of an action, and what its device holds while the action runs, which is what `simulate` counts.

    Attributes:
        device: the index of the device
        number: the number of the action among those of the device, from 1
        total: how many actions the device has
        held: the cells (i, j) from the start of F to the end of B or W, in the order of their F
        waiting: those of them that have run I, and not W
        most: the most cells that the device ever holds at once
    """

    device: int
    number: int
    total: int
    held: list[tuple[int, int]]
    waiting: list[tuple[int, int]]
    most: int


def position_of(program: Program, action: Action) -> Position:
    """Return the position of an action of a program that can run."""
    device = next(k for k, own in enumerate(program) if action in own)
    own = [Action._make(one) for one in program[device]]
    number = own.index(action) + 1
    held: dict[tuple[int, int], bool] = {}
    for kind, i, j in own[: number - 1]:
        if kind in "FI":
            held[i, j] = kind == "I"
        else:
            del held[i, j]
    if action.kind == "F":
        held[action.i, action.j] = False
    waiting = [cell for cell, waits in held.items() if waits]
    return Position(device, number, len(own), list(held), waiting, peak_of(program, action.j))


def peak_of(program: Program, j: int) -> int:
    """Return the most cells that the device of partition ``j`` holds at once."""
    device = next(k for k, own in enumerate(program) if any(one[2] == j for one in own))
    return int(simulate(program).peaks[device])


def in_one_piece(program: Program, whole: Callable[[int, int], bool]) -> Program:
    """Return a program that runs all of backward where ``program`` runs I, in the cells where ``whole(i, j)``.

    A cell that is recomputed is differentiated in one piece, so that nothing of it is left for W.
    """
    return [
        [
            Action("B" if kind == "I" and whole(i, j) else kind, i, j)
            for kind, i, j in own
            if kind != "W" or not whole(i, j)
        ]
        for own in program
    ]


def at_once(program: Program) -> set[tuple[int, int]]:
    """Return the cells whose backward follows their forward on their device: a step does not recompute them."""
    return {(i, j) for own in program for (kind, i, j), after in pairwise(own) if kind == "F" and after[1:] == (i, j)}
