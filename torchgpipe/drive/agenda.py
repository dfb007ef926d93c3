"""The agenda of a step or a call: the cells that there are, and all actions in order, with what each of them needs.

A program knows partitions. The cells of a step are on views, which divide or join partitions. Neighbours are joined if
the program runs them one directly after the other, forward and backward. Fewer cells take less of the host's time.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from torchgpipe.schedule import Action, simulate
from torchgpipe.schedule.action import needs, splits_of, with_recomputation

__all__ = ["Agenda", "FrozenProgram", "agenda_of"]

#: A program that can be the key of a cache.
FrozenProgram: TypeAlias = tuple[tuple[Action, ...], ...]


class Agenda(NamedTuple):
    """What an executor runs.

    Attributes:
        actions: all actions, by clock and device: the order in which errors count
        needs: for each action, the numbers of the actions that it needs
        columns: for each column of cells, the positions of its views
        recomputed: the cells that run again before their backward
    """

    actions: list[Action]
    needs: list[list[int]]
    columns: Sequence[Sequence[int]] = ()
    recomputed: Set[tuple[int, int]] = frozenset()


@lru_cache(maxsize=32)  # Simulating a program takes as long as many cells.
def agenda_of(
    program: FrozenProgram,
    views: tuple[tuple[int, ...], ...],
    joinable: tuple[bool, ...],
    checkpointed: tuple[int, ...] = (),
    *,
    backward: bool,
) -> Agenda:
    """Return the agenda of a step.

    Args:
        program: the actions of each device, in terms of partitions
        views: for each partition, the positions of its views
        joinable: for each view, whether it may be joined with the next one
        checkpointed: for each view, how many micro-batches, from the first on, are recomputed unless their backward
            follows their forward on their device; none if there are no numbers
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
    counts = [checkpointed[column[0]] if checkpointed else 0 for column in columns]
    joined = with_recomputation(joined, counts)
    starts = simulate(joined).starts
    clocked = [(start, device, action) for device, row in enumerate(starts) for action, start in row]
    actions = [action for _, _, action in sorted(clocked)]
    numbers = {action: number for number, action in enumerate(actions)}
    splits = splits_of(joined)
    return Agenda(
        actions,
        [[numbers[needed] for needed in needs(action, splits, len(columns))] for action in actions],
        columns,
        {(i, j) for kind, i, j in actions if kind == "R"},
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
