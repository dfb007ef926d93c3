"""Run a program on paper: when each action starts, how long devices idle, how many activations they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torchgpipe.schedule.action import Action, Kind, Program, needs, splits_of

__all__ = ["COSTS", "Simulation", "simulate"]

#: The usual rule of thumb: backward takes twice the time of forward, half of it for the weights.
COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Simulation(NamedTuple):
    """The outcome of a program.

    Attributes:
        starts: for each device, the action and the time at which it starts, in the order of the program
        seconds: the time from the start of the first action to the end of the last
        busy: for each device, the sum of the costs of its actions
        bubble: the share of the devices' time in which they are idle
        peaks: for each device, the largest number of activations that it holds: from the F of a cell to its B or W, in
            the units of ``memory``
        cost: the cost of an action
    """

    starts: list[list[tuple[Action, float]]]
    seconds: float
    busy: list[float]
    bubble: float
    peaks: list[float]
    cost: Callable[[Action], float]


def simulate(
    program: Program,
    costs: Mapping[Kind, float] | Callable[[Action], float] = COSTS,
    memory: Sequence[float] | None = None,
    *,
    transfer: float = 0.0,
) -> Simulation:
    """Run a program on paper.

    Args:
        program: a list of actions for each device, which can run (see :func:`verify`)
        costs: the cost of an action, in seconds or any other unit: by kind, or a function of the action
        memory: what a micro-batch keeps in each partition until its backward (default: 1 for each)
        transfer: the time that a value takes from one device to another

    Returns:
        the times, the bubble and the peaks
    """
    cost = costs if callable(costs) else _by_kind(costs)
    actions = [[Action._make(action) for action in device] for device in program]
    place = {action.j: device for device, own in enumerate(actions) for action in own}
    n, splits = len(place), splits_of(actions)
    ends: dict[Action, float] = {}
    clocks = [0.0] * len(actions)
    starts: list[list[tuple[Action, float]]] = [[] for _ in actions]
    while any(len(started) < len(own) for started, own in zip(starts, actions)):
        before = len(ends)
        for device, own in enumerate(actions):
            for action in own[len(starts[device]) :]:
                needed = list(needs(action, splits, n))
                if not ends.keys() >= set(needed):
                    break
                arrivals = [ends[one] + transfer * (place[one.j] != device) for one in needed]
                start = max([clocks[device], *arrivals])
                starts[device].append((action, start))
                ends[action] = clocks[device] = start + cost(action)
        if len(ends) == before:
            raise ValueError("the devices of this program wait for each other; schedule.verify tells where")
    busy = [sum(map(cost, own)) for own in actions]
    seconds = max(ends.values(), default=0.0)
    idle = sum(seconds - own for own in busy)
    peaks = [_peak(own, memory) for own in actions]
    return Simulation(starts, seconds, busy, idle / (seconds * len(busy)) if seconds else 0.0, peaks, cost)


def _by_kind(costs: Mapping[Kind, float]) -> Callable[[Action], float]:
    return lambda action: costs[action.kind]


def _peak(actions: Sequence[Action], memory: Sequence[float] | None) -> float:
    live = peak = 0.0
    for kind, _, j in actions:
        unit = 1.0 if memory is None else memory[j]
        if kind == "F":
            live += unit
            peak = max(peak, live)
        elif kind != "I":
            live -= unit
    return peak
