"""Try all schedules, numbers of micro-batches and partitions a device, each with its best choice."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchgpipe.schedule import ScheduleName, program
from torchgpipe.schedule.programs import RESIDENT, usual_places
from torchgpipe_balancing.planning.costs import Costs
from torchgpipe_balancing.planning.problem import Choice, Device, Problem
from torchgpipe_balancing.planning.search import Search

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


#: What takes so much longer than the best before any cut has moved is not improved.
_FAR = 1.5

#: So many alternatives that do not fit are told.
_NEAREST = 3


@dataclass(frozen=True)
class Alternative:
    """A schedule and a number of micro-batches, with the best choice for them.

    Attributes:
        schedule: the name of the schedule
        chunks: the number of micro-batches
        places: the index of the device of each partition
        choice: the balance, and the layers that are recomputed
        seconds: the predicted time of a step; 0 if no times are known
        memory: for each device, the most bytes that it needs
        activations: for each device, those of them that are held for backward
        bubble: the share of the devices' time in which they are idle
        working: seconds in which devices compute, all together, without recomputation
        recomputing: seconds in which devices recompute
        tried: the number of balances that were simulated, of which this is the quickest
        measured: the measured time of a step; 0 if it was not run
    """

    schedule: ScheduleName
    chunks: int
    places: tuple[int, ...]
    choice: Choice
    seconds: float
    memory: tuple[float, ...]
    activations: tuple[float, ...]
    bubble: float
    working: float
    recomputing: float
    tried: int = 1
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

    def can_run(self, schedule: ScheduleName) -> bool:
        """Return whether there are layers and devices enough for a schedule."""
        n = len(self.devices)
        return len(usual_places(schedule, n)) <= len(self.costs.layers) and (n > 1 or schedule == "1F1B")

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
    misfits: list[tuple[Alternative, tuple[float, ...]]]


def alternatives(question: Question, *, keep: int = 10) -> Tried:
    """Return good choices for all schedules and numbers of micro-batches.

    Args:
        question: what to plan for
        keep: how many alternatives are wanted; of as many that begin as the quickest, those are improved that are near
    """
    counts = question.chunks or default_chunks(question.batch, len(question.devices))
    schedules = [schedule for schedule in question.schedules if question.can_run(schedule)]
    searches = [Search(problem_of(question, schedule, chunks)) for chunks in counts for schedule in schedules]
    fitting = sorted([one for one in searches if one.fits], key=lambda one: one.predicted)[:keep]
    for search in fitting:
        if search.predicted <= _FAR * fitting[0].predicted:
            search.improve()
    made = sorted(map(_alternative, fitting), key=lambda one: (one.seconds, max(one.memory)))
    nearest = sorted([one for one in searches if not one.fits], key=lambda one: one.excess)[:_NEAREST]
    limits = [device.memory for device in question.devices]
    return Tried(
        made,
        [
            (one, tuple([max(0.0, need - limit) for need, limit in zip(one.memory, limits)]))
            for one in map(_alternative, nearest)
        ],
    )


def _alternative(search: Search) -> Alternative:
    problem, choice, outcome = search.problem, search.choice, search.outcome
    m = 1 + max(action.i for own in problem.program for action in own)
    recomputing = m * sum(problem.layers[k].forward for k in choice.recomputed)
    seconds = problem.predicted(outcome.seconds)
    return Alternative(
        *(problem.schedule, problem.chunks, problem.places, choice, seconds, tuple(outcome.memory)),
        activations=tuple(outcome.simulation.peaks),
        bubble=outcome.simulation.bubble,
        working=sum(outcome.simulation.busy) - recomputing,
        recomputing=recomputing,
        tried=search.tried,
    )


def rows_of(batch: int, chunks: int) -> int:
    """Return the rows of the largest micro-batch, as `torch.chunk` splits."""
    return math.ceil(batch / chunks)


def default_chunks(batch: int, n: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches to try: powers of two, from about one to 16 for each device."""
    least = 1 << max(0, n - 1).bit_length()
    found = [count for count in (least << k for k in range(5)) if count <= batch]
    return tuple(found or [batch])


def problem_of(question: Question, schedule: ScheduleName, chunks: int) -> Problem:
    """Return the problem of a schedule with so many micro-batches."""
    costs, places = question.costs, usual_places(schedule, len(question.devices))
    rows = rows_of(question.batch, chunks)
    m = math.ceil(question.batch / rows)  # There may be fewer than chunks.
    return Problem(
        layers=costs.layers_at(rows, m, question.states),
        devices=question.devices,
        places=tuple(places),
        program=program(schedule, m, places),
        cell=costs.cells_at(rows),
        latency=costs.latency,
        per_byte=costs.per_byte,
        recomputes=question.recomputes,
        schedule=schedule,
        chunks=chunks,
    )


def most_partitions(schedules: Iterable[str], n: int) -> int:
    """Return the largest number of partitions that a schedule has on ``n`` devices."""
    return max([len(usual_places(schedule, n)) for schedule in schedules])
