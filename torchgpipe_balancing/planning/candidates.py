"""Make a candidate for every schedule and number of micro-batches: a balance by measured times, within the memory.

    1. Balance the seconds of the partitions (`best_split`). If every device has room, that is the candidate.
    2. If not, balance them within the memory, with nothing recomputed, and with all recomputed that saves memory. In
       these three balances, recompute the layers that save most for a second, until all fits.
    3. Of those that fit, the one with the shortest simulated step is the candidate.

Within the memory, partitions of a device are taken to have the same layers. So the answer need not be the best, and
what fits may be missed. Predictions are some per cent off, and the best few candidates run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from torchgpipe.schedule import ScheduleName, program
from torchgpipe.schedule.programs import GENERATED, RESIDENT, usual_places
from torchgpipe_balancing.planning.costs import Costs
from torchgpipe_balancing.planning.problem import Choice, Device, FittedSchedule, Outcome, Problem
from torchgpipe_balancing.split import best_split, sums_between

__all__ = [
    "Candidate",
    "PlanInput",
    "candidates",
    "default_chunks",
    "find_outcome",
    "fitted",
    "least_seconds",
    "most_partitions",
    "nearest",
    "orders",
    "problem_for",
    "problem_of",
    "rows_of",
]


#: So many candidates get programs for the measured times.
_FITTED = 6


@dataclass(frozen=True)
class Candidate:
    """A schedule and a number of micro-batches, with a choice for them.

    Attributes:
        schedule: the name of the schedule
        chunks: the number of micro-batches
        places: the index of the device of each partition
        choice: the balance, and the layers that are recomputed
        seconds: the predicted time of a step; 0 if no times are known
        memory: for each device, the most bytes that it needs
        bubble: the share of the devices' time in which they are idle
        measured: the measured time of a step; 0 if it was not run
        fitted: the schedule that is fastest at the measured times; None for the program of the name
    """

    schedule: ScheduleName
    chunks: int
    places: tuple[int, ...]
    choice: Choice
    seconds: float
    memory: tuple[float, ...]
    bubble: float
    measured: float = 0.0
    fitted: FittedSchedule | None = None


@dataclass(frozen=True)
class PlanInput:
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


def candidates(given: PlanInput) -> list[Candidate]:
    """Return a candidate for each schedule and number of micro-batches that fits, the quickest first."""
    found = [(problem, find_outcome(problem)) for problem in _problems(given)]
    fitting = [_candidate(problem, outcome) for problem, outcome in found if problem.excess(outcome) <= 0]
    return sorted(fitting, key=lambda candidate: (candidate.seconds, max(candidate.memory)))


def fitted(given: PlanInput, found: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates, the best of them with the programs that are fastest at the measured times, if their names are
    of such programs; the quickest first.
    """
    improved = list(found)
    for k, candidate in enumerate(found[:_FITTED]):
        problem = problem_of(given, candidate)
        if candidate.schedule in GENERATED and candidate.seconds:
            schedule = problem.fitted(candidate.choice)
            problem = replace(problem, program=schedule(problem.m, problem.places))
            made = _candidate(problem, problem.outcome(candidate.choice))
            if made.seconds < candidate.seconds:
                improved[k] = replace(made, fitted=schedule)
    return sorted(improved, key=lambda candidate: candidate.seconds)


def least_seconds(given: PlanInput, candidate: Candidate) -> float:
    """Return a time that no program falls below, with the layers of a candidate on its devices."""
    problem = problem_of(given, candidate)
    return problem.predicted(problem.fitted(candidate.choice).least_seconds)


def orders(given: PlanInput) -> list[PlanInput]:
    """Return the same with its devices as they are, from the most memory to the least, and the other way round.

    Under most schedules the first device holds the most micro-batches, and the last one has the loss.
    """
    upwards = sorted(given.devices, key=lambda device: device.memory)
    downwards = sorted(given.devices, key=lambda device: -device.memory)
    tried = dict.fromkeys([given.devices, tuple(downwards), tuple(upwards)])
    return [replace(given, devices=devices) for devices in tried]


def nearest(given: PlanInput) -> Candidate | None:
    """Return a candidate that exceeds the memory by few bytes, if nothing fits; None if no schedule can run."""
    found = [(problem, _nearest_outcome(problem)) for problem in _problems(given)]
    return _candidate(*min(found, key=lambda pair: pair[0].excess(pair[1]))) if found else None


def find_outcome(problem: Problem) -> Outcome:
    """Return what a quick choice costs that fits the devices; if none is found, one that does not fit."""
    even = _balance(problem)
    assert even is not None, "without limits there is a balance"
    plain = problem.outcome(Choice(even))
    if problem.excess(plain) <= 0:
        return plain
    within = [_balance_within(problem, recomputes) for recomputes in {False, problem.may_recompute}]
    balances = dict.fromkeys([even, *within])
    outcomes = [_recompute(problem, balance) for balance in balances if balance is not None]
    return min(outcomes, key=lambda outcome: (max(0.0, problem.excess(outcome)), outcome.seconds))


def _nearest_outcome(problem: Problem) -> Outcome:
    """Return what a choice costs that exceeds the devices by few bytes; nothing fits."""
    best, low = find_outcome(problem), 0.0
    while (excess := problem.excess(best)) - low > max(1.0, excess / 1000):
        middle = (low + excess) / 2
        balance = _balance_within(problem, problem.may_recompute, more=middle)
        outcome = best if balance is None else _recompute(problem, balance)
        if problem.excess(outcome) < excess:
            best = outcome
        else:
            low = middle
    return best


def _balance_within(problem: Problem, recomputes: bool, more: float = 0.0) -> tuple[int, ...] | None:
    """Return the balance whose partitions take equally long, among those that fit; None if none is found.

    Args:
        problem: the problem
        recomputes: whether layers may be recomputed so that it fits
        more: bytes that each device has beside its memory
    """
    layers, held = problem.layers, _micro_batches_held(problem)
    again = np.array([*[layer.again for layer in layers], 0.0])[:, None]
    kept = again + sums_between([layer.kept + layer.waiting for layer in layers])
    if recomputes:
        least = again + sums_between([*[min(layer.kept, layer.input) for layer in layers[:-1]], layers[-1].kept])
        room = np.maximum.accumulate(np.triu([0.0, *[layer.kept for layer in layers]], k=1), axis=1)
    state = sums_between([layer.state for layer in layers])
    fits = []
    for place in problem.places:
        # All partitions of a device are taken to have the same layers.
        alike = [held[k] for k, other in enumerate(problem.places) if other == place]
        need = sum(alike) * kept
        if recomputes:
            need = np.minimum(need, sum(alike) * least + room)
        fits.append(need + len(alike) * state <= problem.devices[place].memory + more)
    return _balance(problem, fits)


def _balance(problem: Problem, fits: Sequence[Any] | None = None) -> tuple[int, ...] | None:
    """Return the balance whose partitions take equally long; see `best_split`."""
    seconds = [layer.forward + layer.backward for layer in problem.layers]
    cuts = best_split(seconds, [problem.devices[place].slowness for place in problem.places], fits)
    return None if cuts is None else tuple([end - start for start, end in pairwise(cuts)])


def _recompute(problem: Problem, balance: tuple[int, ...]) -> Outcome:
    """Return what a balance costs, with the layers recomputed on each device that save most for a second.

    These are as few as are enough, or the number that comes nearest.
    """
    outcome, held = problem.outcome(Choice(balance)), _micro_batches_held(problem)
    if not problem.may_recompute:
        return outcome
    of_layers = [j for j, count in enumerate(balance) for _ in range(count)]
    cell = problem.cell.forward + problem.cell.backward  # Beside the forward of a layer, its recomputation takes these.

    def saves(k: int) -> float:
        return held[of_layers[k]] * (problem.layers[k].kept - problem.layers[k].input)

    recomputed: set[int] = set()
    for device, need in enumerate(outcome.memory):
        # The backward of the last layer follows its forward at once.
        owned = [k for k, j in enumerate(of_layers[:-1]) if problem.places[j] == device and saves(k) > 0]
        owned.sort(key=lambda k: -saves(k) / max(problem.layers[k].forward + cell, 1e-300))
        room, needs = 0.0, [need]
        for k in owned:
            # While one layer is recomputed, the device needs room for it.
            need, room = need - saves(k), max(room, problem.layers[k].kept)
            needs.append(need + room)
        limit = problem.devices[device].memory
        count = next((count for count, size in enumerate(needs) if size <= limit), needs.index(min(needs)))
        recomputed.update(owned[:count])
    return problem.outcome(Choice(balance, frozenset(recomputed))) if recomputed else outcome


def _micro_batches_held(problem: Problem) -> list[int]:
    """Return how many micro-batches each partition holds at the fullest moment of its device."""
    held = [0] * len(problem.places)
    for actions in problem.program:
        counts, most = Counter[int](), 0
        for action in actions:
            counts[action.j] += {"F": 1, "I": 0}.get(action.kind, -1)
            if counts.total() > most:
                most = counts.total()
                for j, count in counts.items():
                    held[j] = count
    return held


def _candidate(problem: Problem, outcome: Outcome) -> Candidate:
    return Candidate(
        schedule=problem.schedule,
        chunks=problem.chunks,
        places=problem.places,
        choice=outcome.choice,
        seconds=problem.predicted(outcome.seconds),
        memory=tuple(outcome.memory),
        bubble=outcome.simulation.bubble,
    )


def rows_of(batch: int, chunks: int) -> int:
    """Return the rows of the largest micro-batch, as `torch.chunk` splits."""
    return math.ceil(batch / chunks)


def default_chunks(batch: int, n: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches to try: powers of two, from about one to 16 for each device."""
    least = 1 << max(0, n - 1).bit_length()
    counts = [least << k for k in range(5)]
    return tuple([count for count in counts if count <= batch]) or (batch,)


def most_partitions(schedules: Iterable[str], n: int) -> int:
    """Return the largest number of partitions that a schedule has on ``n`` devices."""
    return max([len(usual_places(schedule, n)) for schedule in schedules])


def _problems(given: PlanInput) -> Iterator[Problem]:
    """Yield the problems of the schedules and placements that these layers and devices are enough for."""
    n = len(given.devices)
    for chunks, schedule in product(given.chunks or default_chunks(given.batch, n), given.schedules):
        rounds = [[*range(n)] * 4] if schedule == "Interleaved1F1B" else []
        for places in [usual_places(schedule, n), *rounds]:
            if len(places) <= len(given.costs.layers) and (n > 1 or schedule == "1F1B"):
                yield problem_for(given, schedule, chunks, places)


def problem_of(given: PlanInput, candidate: Candidate) -> Problem:
    """Return the problem that a candidate solves."""
    problem = problem_for(given, candidate.schedule, candidate.chunks, candidate.places)
    if candidate.fitted is None:
        return problem
    return replace(problem, program=candidate.fitted(problem.m, problem.places))


def problem_for(given: PlanInput, schedule: ScheduleName, chunks: int, places: Sequence[int]) -> Problem:
    """Return the problem of a schedule with so many micro-batches."""
    costs, rows = given.costs, rows_of(given.batch, chunks)
    m = math.ceil(given.batch / rows)  # There may be fewer than chunks.
    return Problem(
        layers=costs.layers_at(rows, given.states),
        devices=given.devices,
        places=tuple(places),
        program=program(schedule, m, places),
        cell=costs.cells_at(rows),
        latency=costs.latency,
        per_byte=costs.per_byte,
        recomputes=given.recomputes,
        schedule=schedule,
        chunks=chunks,
    )
