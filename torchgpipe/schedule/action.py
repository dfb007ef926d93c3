"""Programs: the actions of every device, in their order, as plain data.

A *cell* (i, j) is micro-batch i on partition j. An action computes a part of a cell:

    F   forward
    B   backward
    I   the first half of backward: the gradient of the cell's input
    W   the second half of backward: the gradients of the cell's weights
    R   the recomputation of a cell that has left no graph; it needs no gradient, so it can be done before that is there

A program splits the backward of a cell into I and W, or runs all of it as B. It has no R: a pipeline adds R before the
backward of each cell that it recomputes. The lists alone tell what an action needs:

    F(i, j) needs F(i, j-1);   B or I (i, j) needs F(i, j) and the B or I of (i, j+1);   W(i, j) needs I(i, j)
    R(i, j) needs F(i, j)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Action", "Kind", "Program", "at_once", "in_order", "needs", "splits_of", "verify", "with_recomputation"]

Kind: TypeAlias = Literal["F", "B", "I", "W", "R"]


class Action(NamedTuple):
    """A part of a cell.

    Attributes:
        kind: the part
        i: the micro-batch
        j: the partition
    """

    kind: Kind
    i: int
    j: int

    def __str__(self) -> str:
        return f"{self.kind}({self.i},{self.j})"


#: A list of actions for each device.
Program: TypeAlias = Sequence[Sequence[Action]]


def needs(action: Action, splits: Mapping[tuple[int, int], bool], n: int) -> Iterator[Action]:
    """Yield the actions that ``action`` needs.

    Args:
        action: an action of a program
        splits: for each cell, whether its backward is split into I and W
        n: the number of partitions
    """
    kind, i, j = action
    if kind == "W":
        yield Action("I", i, j)
    elif kind == "F":
        if j > 0:
            yield Action("F", i, j - 1)
    elif kind == "R":
        yield Action("F", i, j)
    else:
        yield Action("F", i, j)
        if j < n - 1:
            yield Action("I" if splits[i, j + 1] else "B", i, j + 1)


def splits_of(program: Program) -> dict[tuple[int, int], bool]:
    """Return for each cell of a program whether its backward is split into I and W."""
    return {(i, j): kind == "I" for actions in program for kind, i, j in actions if kind in ("B", "I")}


def at_once(program: Program) -> set[tuple[int, int]]:
    """Return the cells whose backward follows their forward on their device: a step does not recompute them."""
    return {
        (i, j)
        for actions in program
        for (kind, i, j), after in pairwise(actions)
        if kind == "F" and after[1:] == (i, j)
    }


def with_recomputation(program: Program, counts: Sequence[int], *, keeps: bool = True) -> list[list[Action]]:
    """Return a program with an R before the backward of each cell that is recomputed.

    Args:
        program: a list of actions for each device
        counts: for each partition, how many micro-batches, from the first that it runs on, are recomputed
        keeps: whether a cell is not recomputed if its backward follows its forward on the device
    """
    kept = at_once(program) if keeps and any(counts) else set()
    #: By partition, its micro-batches in the order in which it runs them.
    order: dict[int, list[int]] = {}
    for actions in program:
        for kind, i, j in actions:
            if kind == "F":
                order.setdefault(j, []).append(i)
    recomputed = {(i, j) for j, numbers in order.items() for i in numbers[: counts[j]]} - kept
    return [
        [
            done
            for kind, i, j in actions
            for done in (
                [Action("R", i, j), Action(kind, i, j)]
                if kind in ("B", "I") and (i, j) in recomputed
                else [Action(kind, i, j)]
            )
        ]
        for actions in program
    ]


def in_order(program: Program) -> Iterator[tuple[Action, int, list[tuple[Action, bool]]]]:
    """Yield all actions, each behind those that it needs.

    Args:
        program: a list of actions for each device

    Yields:
        the action, its device, and the actions that it needs, each with whether it is of another device

    Raises:
        ValueError: the devices wait for each other. The message has the next action of each.
    """
    actions = [[Action._make(action) for action in device] for device in program]
    place = {action.j: device for device, row in enumerate(actions) for action in row}
    n, splits = len(place), splits_of(actions)
    done: set[Action] = set()
    ran = [0] * len(actions)
    while any(count < len(row) for count, row in zip(ran, actions)):
        before = len(done)
        for device, row in enumerate(actions):
            for action in row[ran[device] :]:
                needed = list(needs(action, splits, n))
                if not done.issuperset(needed):
                    break
                yield action, device, [(earlier, place[earlier.j] != device) for earlier in needed]
                done.add(action)
                ran[device] += 1
        if len(done) == before:
            stuck = [str(row[count]) for count, row in zip(ran, actions) if count < len(row)]
            raise ValueError(f"the devices would wait for each other, at {', '.join(stuck)}")


def verify(program: Program, m: int, places: Sequence[int]) -> None:
    """Check that a program runs every cell, on the right device, without a deadlock.

    Args:
        program: a list of actions for each device
        m: the number of micro-batches
        places: the index of the device of each partition

    Raises:
        ValueError: an action is missing, occurs twice or is on another device than its partition, or the devices would
            wait for each other for ever. The message lists the actions.
    """
    n = len(places)
    faults = []
    seen: set[Action] = set()
    for device, actions in enumerate(program):
        for action in map(Action._make, actions):
            if action.kind not in ("F", "B", "I", "W") or not (0 <= action.i < m and 0 <= action.j < n):
                faults.append(f"{action} is no action of {m} micro-batches and {n} partitions")
            elif places[action.j] != device:
                faults.append(f"{action} is on device {device}, but partition {action.j} on device {places[action.j]}")
            elif action in seen:
                faults.append(f"{action} occurs twice")
            seen.add(action)
    for j in range(n):
        for i in range(m):
            kinds = {kind for kind in ("F", "B", "I", "W") if Action(kind, i, j) in seen}
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                faults.append(f"cell ({i},{j}) has {sorted(kinds) or 'no action'}, but needs F and B, or F, I and W")
    if not faults:
        try:
            list(in_order(program))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(f"this program cannot run: {'; '.join(faults[:5])}{more}")
