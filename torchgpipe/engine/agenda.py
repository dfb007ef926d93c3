"""The agenda of a step: the cells that there are, and all actions in their order, with what each of them needs.

A program knows partitions. The cells of a step are on views, which divide or join partitions. Neighbours are joined if
the program runs them one directly after the other, forward and backward. Fewer cells take less of the host's time.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from torchgpipe.schedule import Action, simulate
from torchgpipe.schedule.action import at_once, needs, splits_of

__all__ = ["Agenda", "FrozenProgram", "agenda_of"]

#: A program that can be the key of a cache.
FrozenProgram: TypeAlias = tuple[tuple[Action, ...], ...]


class Agenda(NamedTuple):
    """What a step runs.

    Attributes:
        columns: for each column of cells, the positions of its views
        actions: all actions, by clock and device: the order in which errors count
        needs: for each action, the numbers of the actions that it needs
        keeps: the cells whose backward follows their forward on their device
    """

    columns: list[list[int]]
    actions: list[Action]
    needs: list[list[int]]
    keeps: set[tuple[int, int]]


@lru_cache(maxsize=32)  # Simulating a program takes as long as many cells.
def agenda_of(
    program: FrozenProgram, views: tuple[tuple[int, ...], ...], joinable: tuple[bool, ...], *, backward: bool
) -> Agenda:
    """Return the agenda of a step.

    Args:
        program: the actions of each device, in terms of partitions
        views: for each partition, the positions of its views
        joinable: for each view, whether it may be joined with the next one
        backward: whether backward runs
    """
    divided = [
        [Action(kind, i, view) for kind, i, j in actions for view in views[j][:: 1 if kind == "F" else -1]]
        for actions in program
    ]
    columns: list[list[int]] = []
    for view in range(len(joinable)):
        if columns and joinable[view - 1] and _are_neighbours(divided, view - 1, view):
            columns[-1].append(view)
        else:
            columns.append([view])
    first, last = ({column[k]: j for j, column in enumerate(columns)} for k in (0, -1))
    joined = [
        [
            Action(kind, i, ends[view])
            for kind, i, view in actions
            for ends in [first if kind == "F" else last]
            if view in ends and (backward or kind == "F")
        ]
        for actions in divided
    ]
    starts = simulate(joined).starts
    clocked = [(start, device, action) for device, row in enumerate(starts) for action, start in row]
    actions = [action for _, _, action in sorted(clocked)]
    numbers = {action: number for number, action in enumerate(actions)}
    splits = splits_of(joined)
    return Agenda(
        columns,
        actions,
        [[numbers[needed] for needed in needs(action, splits, len(columns))] for action in actions],
        at_once(joined),
    )


def _are_neighbours(program: list[list[Action]], a: int, b: int) -> bool:
    """Return whether view ``b`` runs directly after ``a``, and backward, in one piece, directly before it."""
    actions = next(actions for actions in program if any(action.j == a for action in actions))
    followers = {(action, follower) for action, follower in pairwise(actions)}
    forward = {i for kind, i, j in actions if kind == "F" and j == a}
    return all(
        (Action("F", i, a), Action("F", i, b)) in followers and (Action("B", i, b), Action("B", i, a)) in followers
        for i in forward
    )
