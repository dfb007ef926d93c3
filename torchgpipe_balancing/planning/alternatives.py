"""Try all schedules, numbers of micro-batches and partitions a device, each with its best choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchgpipe.schedule import ScheduleName, program
from torchgpipe.schedule.programs import RESIDENT, usual_places
from torchgpipe_balancing.planning.costs import CellCosts, Costs
from torchgpipe_balancing.planning.problem import Choice, Device, Outcome, Problem
from torchgpipe_balancing.planning.search import Misfit, lower_bound, solve

__all__ = [
    "Alternative",
    "Question",
    "Tried",
    "alternatives",
    "default_chunks",
    "most_partitions",
    "problem_of",
    "rows_of",
]


@dataclass(frozen=True)
class Alternative:
    """A schedule and a number of micro-batches, with the best choice for them.

    Attributes:
        schedule: the name of the schedule
        chunks: the number of micro-batches
        places: the index of the device of each partition
        choice: the balance, and the layers that are recomputed
        seconds: the predicted time of a step; 0 if no times are known
        least: no choice for this schedule and these chunks that fits takes less, by the same prediction
        memory: for each device, the most bytes that it needs
        activations: for each device, those of them that are held for backward
        bubble: the share of the devices' time in which they are idle
        working: seconds in which devices compute, all together, without recomputation
        recomputing: seconds in which devices recompute
        measured: the measured time of a step; 0 if it was not run
    """

    schedule: ScheduleName
    chunks: int
    places: tuple[int, ...]
    choice: Choice
    seconds: float
    least: float
    memory: tuple[float, ...]
    activations: tuple[float, ...]
    bubble: float
    working: float
    recomputing: float
    measured: float = 0.0


@dataclass(frozen=True)
class Question:
    """What to plan for.

    Attributes:
        costs: what was measured
        devices: the devices, with the memory that a plan may use
        batch: the rows of a mini-batch
        states: bytes of gradients and of the optimizer's states for each byte of a parameter that requires grad
        schedules: the schedules to try
        chunks: the numbers of micro-batches to try
        recomputes: whether layers may be recomputed
    """

    costs: Costs
    devices: tuple[Device, ...]
    batch: int
    states: float
    schedules: tuple[ScheduleName, ...] = RESIDENT
    chunks: tuple[int, ...] = ()
    recomputes: bool = True

    def with_memory(self, more: float) -> Question:
        """Return the question for devices with so many more bytes each."""
        return replace(self, devices=tuple(replace(one, memory=one.memory + more) for one in self.devices))

    def with_devices(self, n: int) -> Question:
        """Return the question for so many devices; the new ones are like the last."""
        last = self.devices[-1]
        more = [replace(last, name=f"one more like {last.name}") for _ in range(n - len(self.devices))]
        return replace(self, devices=(*self.devices[:n], *more))


class Tried(NamedTuple):
    """The outcome of all attempts.

    Attributes:
        fitting: the alternatives that fit, the quickest first
        misfits: those that do not, with the bytes that devices lack, the nearest to fitting first
    """

    fitting: list[Alternative]
    misfits: list[tuple[Alternative, list[float]]]


def alternatives(question: Question, *, keep: int = 10) -> Tried:
    """Return the best choices for all schedules and numbers of micro-batches.

    Args:
        question: what to plan for
        keep: how many alternatives are wanted; what cannot be among them is not searched
    """
    attempts = sorted(_attempts(question), key=lambda attempt: attempt.bound)
    fitting: list[Alternative] = []
    misfits = []
    for attempt in attempts:
        if len(fitting) >= keep and attempt.bound >= fitting[keep - 1].seconds:
            continue
        found = solve(attempt.problem)
        made = attempt.alternative(found.choice, found.outcome)
        if isinstance(found, Misfit):
            misfits.append((made, found.excess))
        else:
            fitting.append(replace(made, least=made.seconds / (1 + found.gap)))
            fitting.sort(key=lambda one: (one.seconds, max(one.memory)))
    misfits.sort(key=lambda pair: max(pair[1]))
    return Tried(fitting[:keep], misfits)


class _Attempt(NamedTuple):
    """A schedule with a number of micro-batches, before the search; no choice takes less than its bound."""

    schedule: ScheduleName
    chunks: int
    problem: Problem
    cells: CellCosts
    bound: float

    def alternative(self, choice: Choice, outcome: Outcome) -> Alternative:
        m = 1 + max(action.i for own in self.problem.program for action in own)
        again = m * sum(self.problem.layers[k].forward for k in choice.recomputed)
        seconds = self.cells.predicted(outcome.seconds)
        return Alternative(
            self.schedule,
            self.chunks,
            self.problem.places,
            choice,
            seconds,
            seconds,
            tuple(outcome.memory),
            tuple(outcome.simulation.peaks),
            outcome.simulation.bubble,
            sum(outcome.simulation.busy) - again,
            again,
        )


def _attempts(question: Question) -> Iterator[_Attempt]:
    for chunks in question.chunks or default_chunks(question.batch, len(question.devices)):
        for schedule in question.schedules:
            problem = problem_of(question, schedule, chunks)
            if problem is not None:
                cells = question.costs.cells_at(rows_of(question.batch, chunks))
                yield _Attempt(schedule, chunks, problem, cells, cells.predicted(lower_bound(problem)))


def rows_of(batch: int, chunks: int) -> int:
    """Return the rows of the largest micro-batch, as `torch.chunk` splits."""
    return math.ceil(batch / chunks)


def default_chunks(batch: int, n: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches to try: powers of two, from about one to 16 for each device."""
    least = 1 << max(0, n - 1).bit_length()
    found = [count for count in (least << k for k in range(5)) if count <= batch]
    return tuple(found or [batch])


def problem_of(question: Question, schedule: ScheduleName, chunks: int) -> Problem | None:
    """Return the problem of a schedule with so many micro-batches; None if there are too few layers or devices."""
    costs, n = question.costs, len(question.devices)
    places = usual_places(schedule, n)
    if len(places) > len(costs.layers) or (n == 1 and schedule != "1F1B"):
        return None
    rows = rows_of(question.batch, chunks)
    m = math.ceil(question.batch / rows)  # There may be fewer than chunks.
    cell = costs.cells_at(rows)
    return Problem(
        layers=costs.layers_at(rows, m, question.states),
        devices=question.devices,
        places=tuple(places),
        program=program(schedule, m, places),
        cell={"F": cell.forward, "B": cell.backward, "I": cell.inputs, "W": cell.weights},
        latency=costs.latency,
        per_byte=costs.per_byte,
        recomputes=question.recomputes,
    )


def most_partitions(schedules: Iterable[str], n: int) -> int:
    """Return the largest number of partitions that a schedule has on ``n`` devices."""
    return max([len(usual_places(schedule, n)) for schedule in schedules])
