"""Run a program on paper: when each action starts, how long devices idle, how much memory they hold.

An action starts when its device has finished the action before it, and everything that it needs has arrived:

    start  =  max(end of the action before it,  end of each needed action + transfer)
    end    =  start + cost

Plans and benchmarks use this model of time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from torchgpipe.schedule.action import Action, Kind, Program, in_order

__all__ = ["COSTS", "Memory", "Simulation", "simulate"]

#: The usual rule of thumb: backward takes twice the time of forward, half of it for the weights.
COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "R": 1.0}

#: What cells keep: a number for each partition, or, where micro-batches differ, a function of the action.
Memory: TypeAlias = Sequence[float] | Callable[[Action], float]


class Simulation(NamedTuple):
    """The outcome of a program.

    Attributes:
        starts: for each device, the action and the time at which it starts, in the order of the program
        seconds: the time from the start of the first action to the end of the last
        busy: for each device, the sum of the costs of its actions
        bubble: the share of the devices' time in which they are idle
        peaks: for each device, the most memory that it holds for cells, in the units of ``memory``
        cost: the cost of an action
        changes: by how much an action changes the memory that its device holds: at its start, and at its end
    """

    starts: list[list[tuple[Action, float]]]
    seconds: float
    busy: list[float]
    bubble: float
    peaks: list[float]
    cost: Callable[[Action], float]
    changes: Callable[[Action], tuple[float, float]]


def simulate(
    program: Program,
    costs: Mapping[Kind, float] | Callable[[Action], float] = COSTS,
    memory: Memory | None = None,
    *,
    waiting: Memory | None = None,
    transfer: float | Callable[[Action], float] = 0.0,
) -> Simulation:
    """Run a program on paper.

    Args:
        program: a list of actions for each device, which can run (see :func:`verify`)
        costs: the cost of an action, in seconds or any other unit: by kind, or a function of the action, as for
            micro-batches that differ
        memory: what a micro-batch keeps in each partition until its backward (default: 1 for each)
        waiting: what a micro-batch keeps in each partition besides, between I and W (default: nothing)
        transfer: the time that a value takes from one device to another, or a function that gives it for the action
            behind the boundary

    Returns:
        the times, the bubble and the peaks
    """
    cost = costs if callable(costs) else _by_kind(costs)
    passage = transfer if callable(transfer) else (lambda _: transfer)
    ends: dict[Action, float] = {}
    clocks = [0.0] * len(program)
    starts: list[list[tuple[Action, float]]] = [[] for _ in program]
    for action, device, needed in in_order(program):
        start = clocks[device]
        for earlier, is_foreign in needed:
            behind = action if action.j > earlier.j else earlier
            start = max(start, ends[earlier] + (passage(behind) if is_foreign else 0.0))
        starts[device].append((action, start))
        ends[action] = clocks[device] = start + cost(action)
    busy = [sum([cost(action) for action, _ in row]) for row in starts]
    seconds = max(ends.values(), default=0.0)
    idle = sum(seconds - time for time in busy)
    changes = partial(_changes, memory=memory, waiting=waiting)
    steps = [[change for action in row for change in changes(Action._make(action))] for row in program]
    peaks = [max(accumulate(of_device), default=0.0) for of_device in steps]
    return Simulation(starts, seconds, busy, idle / (seconds * len(busy)) if seconds else 0.0, peaks, cost, changes)


def _changes(action: Action, memory: Memory | None, waiting: Memory | None) -> tuple[float, float]:
    """Return by how much an action changes the memory that its device holds: at its start, and at its end.

    A cell is held from the start of F to the end of B or W. Gradients at weights wait from the end of I to that of W.
    """
    kind, unit, waits = action.kind, _kept(memory, action, 1.0), _kept(waiting, action, 0.0)
    if kind == "F":
        return unit, 0.0
    if kind == "R":
        return 0.0, 0.0
    return 0.0, waits if kind == "I" else -unit - (waits if kind == "W" else 0.0)


def _by_kind(costs: Mapping[Kind, float]) -> Callable[[Action], float]:
    return lambda action: costs[action.kind]


def _kept(memory: Memory | None, action: Action, otherwise: float) -> float:
    if memory is None:
        return otherwise
    return memory(action) if callable(memory) else memory[action.j]
