"""Run a program on paper: when each action starts, how long devices idle, how much memory they hold.

An action starts when its device has finished the action before it, and everything that it needs has arrived:

    start  =  max(end of the action before it,  end of each needed action + transfer)
    end    =  start + cost

Plans and benchmarks use this model of time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from torchgpipe.schedule.action import Action, Kind, Program, in_order

__all__ = ["COSTS", "Costs", "Memory", "Simulation", "Terms", "Transfer", "simulate"]

#: The usual rule of thumb: backward takes twice the time of forward, half of it for the weights.
COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "R": 1.0}

#: The seconds of an action, or any other unit: by kind, or, where micro-batches or partitions differ, a function of it.
Costs: TypeAlias = Mapping[Kind, float] | Callable[[Action], float]

#: The time that a value takes from one device to another; or a function of the action behind the boundary.
Transfer: TypeAlias = float | Callable[[Action], float]

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


class Terms(NamedTuple):
    """What actions take on paper: the arguments of `simulate`."""

    costs: Costs
    memory: Memory | None
    waiting: Memory | None
    recomputed: Memory | None
    transfer: Transfer

    def cost(self, action: Action) -> float:
        """Return the time of an action."""
        return self.costs(action) if callable(self.costs) else self.costs[action.kind]

    def passage(self, earlier: Action, later: Action) -> float:
        """Return the time that a value takes from one device to another."""
        behind = later if later.j > earlier.j else earlier
        return self.transfer(behind) if callable(self.transfer) else self.transfer

    def kept(self, action: Action) -> tuple[float, float, float]:
        """Return what the cell of an action keeps until backward, between I and W besides, and from R on besides."""
        given = (self.memory, 1.0), (self.waiting, 0.0), (self.recomputed, 0.0)
        kept = [usual if of is None else of(action) if callable(of) else of[action.j] for of, usual in given]
        return kept[0], kept[1], kept[2]

    def changes(self, action: Action, *, again: bool) -> tuple[float, float]:
        """Return by how much an action changes the memory that its device holds: at its start, and at its end.

        A cell is held from the start of F to the end of B or W, in a part from the start of R if that runs ``again``.
        Gradients at weights wait from the end of I to that of W.
        """
        kind, (unit, waits, more) = action.kind, self.kept(action)
        if kind in ("F", "R"):
            return (more if kind == "R" else unit if again else unit + more), 0.0
        return 0.0, waits if kind == "I" else -unit - more - (waits if kind == "W" else 0.0)


def simulate(
    program: Program,
    costs: Costs = COSTS,
    memory: Memory | None = None,
    *,
    waiting: Memory | None = None,
    recomputed: Memory | None = None,
    transfer: Transfer = 0.0,
) -> Simulation:
    """Run a program on paper.

    Args:
        program: a list of actions for each device, which can run (see :func:`verify`)
        costs: the cost of an action, in seconds or any other unit: by kind, or a function of the action, as for
            micro-batches that differ
        memory: what a micro-batch keeps in each partition until its backward (default: 1 for each)
        waiting: what a micro-batch keeps in each partition besides, between I and W (default: nothing)
        recomputed: what a micro-batch keeps in each partition besides, from R on; without an R, from F on (default:
            nothing)
        transfer: the time that a value takes from one device to another, or a function that gives it for the action
            behind the boundary

    Returns:
        the times, the bubble and the peaks
    """
    terms = Terms(costs, memory, waiting, recomputed, transfer)
    ends: dict[Action, float] = {}
    clocks = [0.0] * len(program)
    starts: list[list[tuple[Action, float]]] = [[] for _ in program]
    for action, device, needed in in_order(program):
        start = clocks[device]
        for earlier, is_foreign in needed:
            start = max(start, ends[earlier] + (terms.passage(earlier, action) if is_foreign else 0.0))
        starts[device].append((action, start))
        ends[action] = clocks[device] = start + terms.cost(action)
    busy = [sum([terms.cost(action) for action, _ in row]) for row in starts]
    seconds = max(ends.values(), default=0.0)
    idle = sum(seconds - time for time in busy)
    again = {(action.i, action.j) for action in ends if action.kind == "R"}

    def changes(action: Action) -> tuple[float, float]:
        return terms.changes(action, again=action[1:] in again)

    steps = [[change for action in row for change in changes(Action._make(action))] for row in program]
    peaks = [max(accumulate(of_device), default=0.0) for of_device in steps]
    bubble = idle / (seconds * len(busy)) if seconds else 0.0
    return Simulation(starts, seconds, busy, bubble, peaks, terms.cost, changes)
