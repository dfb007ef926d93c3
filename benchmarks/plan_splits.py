"""Plans on random layers: how near the search comes to the best choice, and what that is worth.

1. Small problems of all schedules, some with too little memory: all choices are compared with the answer of the search.
2. Layers with random times, no limit of memory: the simulated step of 1F1B with balances that are found in other ways,
   over that of ours: an even number of layers; by parameters; by time, with the block partition of torchgpipe 0.0.7,
   which runs unchanged in a process of its own; by time, by halving: a bisection of the largest load, where whatever
   fits into a load goes into a partition, from the left to the right. Balances with an empty partition are counted,
   but not simulated.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, combinations, pairwise
from typing import Any

from benchmarks.balance import KINDS, optimum, random_costs
from benchmarks.peers import running
from benchmarks.placement import even
from benchmarks.program import Progress
from benchmarks.records import aim, spread, table_of
from torchgpipe.schedule import ScheduleName, program
from torchgpipe.schedule.programs import RESIDENT, usual_places
from torchgpipe_balancing import partition
from torchgpipe_balancing.planning.candidates import find_outcome
from torchgpipe_balancing.planning.problem import CellCosts, Choice, Device, Layer, Problem

__all__ = ["plan_optimal", "plan_splits", "random_problem", "splits"]

#: Sums are rounded in another order.
NEAR = 1e-9

#: A choice that takes so much of the best one is nearly as good, and the share of the problems in which it is to be.
NEARLY, MOST = 1.03, 0.95


def random_problem(name: ScheduleName, rng: random.Random, size: int, devices: int, m: int, share: float) -> Problem:
    """Return random layers for a schedule, on devices with a share of the memory that all activations of 1F1B take."""
    places = usual_places(name, devices)
    costs = random_costs(rng.choice(KINDS), rng, size)
    layers = tuple(
        Layer(
            cost * 1e-6,
            cost * rng.uniform(1.5, 2.5) * 1e-6,
            cost * rng.uniform(0.7, 1.3) * 1e-6,
            cost * rng.uniform(0.7, 1.3) * 1e-6,
            kept=(kept := rng.choice([10, 20, 50, rng.randint(1, 100)])),
            input=min(kept, rng.choice([0, 10])),
            waiting=rng.choice([0, 5]),
            crossing=10,
            state=rng.choice([0, 20]),
        )
        for cost in costs
    )
    kept, state = (sum(getattr(layer, name) for layer in layers) for name in ("kept", "state"))
    memory = share * (min(m, devices) * kept + state) / devices
    return Problem(
        layers,
        tuple(Device(str(k), memory) for k in range(devices)),
        tuple(places),
        program(name, m, places),
        CellCosts(*[10e-6] * 4),
        latency=5e-6,
        per_byte=1e-7,
    )


def choices(problem: Problem) -> Iterator[Choice]:
    """Yield all choices that there are."""
    size = len(problem.layers)
    may = range(size - 1 if problem.may_recompute else 0)
    sets = list(chain.from_iterable(combinations(may, count) for count in range(len(may) + 1)))
    for cuts in combinations(range(1, size), len(problem.places) - 1):
        balance = tuple(end - start for start, end in pairwise((0, *cuts, size)))
        yield from (Choice(balance, frozenset(recomputed)) for recomputed in sets)


def checked(count: int) -> list[dict[str, Any]]:
    """Answer question 1, with so many problems of each schedule."""
    rows = []
    progress = Progress(len(RESIDENT))
    for name in RESIDENT:
        progress(f"small problems: {name}")
        rng = random.Random(name)
        row: dict[str, Any] = {"schedule": name, "problems": count, "misfits": 0, "optimal": 0, "near": 0, "wrong": 0}
        row["worst"] = 1.0
        for _ in range(count):
            devices = rng.choice([1, 2] if len(usual_places(name, 2)) > 2 else [2, 3])
            size = rng.randint(max(4, 2 * devices), 6)
            problem = random_problem(name, rng, size, devices, rng.randint(1, 5), rng.uniform(0.4, 1.5))
            outcomes = (problem.outcome(choice) for choice in choices(problem))
            best = min([outcome.seconds for outcome in outcomes if problem.excess(outcome) <= 0], default=math.inf)
            found = find_outcome(problem)
            fits = problem.excess(found) <= 0
            row["wrong"] += (best < math.inf) != fits
            if fits:
                ratio = found.seconds / best
                row["optimal"] += ratio <= 1 + NEAR
                row["near"] += ratio <= NEARLY
                row["worst"] = max(row["worst"], ratio)
            else:
                row["misfits"] += 1
        rows.append(row)
    return rows


def halved(costs: Sequence[int], partitions: int) -> list[int]:
    """Return a balance by halving the largest load: it fills partitions from the left, each with a layer at least."""
    sums, cuts = list(accumulate(costs, initial=0)), [0]
    bound = optimum(costs, partitions)
    for j in range(1, partitions):
        most = bisect_right(sums, sums[cuts[-1]] + bound) - 1
        cuts.append(min(most, len(costs) - (partitions - j)))
    return [end - start for start, end in pairwise([*cuts, len(costs)])]


def by_original(tables: list[tuple[list[int], int]], limit: float) -> list[list[int] | None]:
    """Return the balances of torchgpipe 0.0.7; None for all if it is not there, or for one if it takes too long."""
    balances: list[list[int] | None] = [None] * len(tables)
    try:
        with running(["original"], "splits.py") as peers:
            for partitions in sorted({partitions for _, partitions in tables}):
                indices = [k for k, (_, count) in enumerate(tables) if count == partitions]
                vectors = [tables[k][0] for k in indices]
                request = {"kind": "solve", "vectors": vectors, "partitions": partitions, "limit": limit}
                for k, balance in zip(indices, peers["original"].ask(request)["balances"], strict=True):
                    balances[k] = balance
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"torchgpipe 0.0.7 is left out: {error}")
    return balances


def compared(count: int, limit: float) -> dict[str, Any]:
    """Answer question 2."""
    rng = random.Random(0)
    tables, problems, parameters = [], [], []
    for index in range(count):
        size, partitions, m = rng.randint(12, 64), rng.randint(2, 8), rng.choice([4, 8, 16, 32])
        costs = random_costs(KINDS[index % len(KINDS)], rng, size)
        layers = tuple(Layer(cost / 3e6, cost / 1.5e6) for cost in costs)
        places = tuple(range(partitions))
        devices = tuple(Device(str(k)) for k in places)
        tables.append((costs, partitions))
        problems.append(Problem(layers, devices, places, program("1F1B", m, places)))
        # Of parameters one knows only that costly layers tend to have more.
        parameters.append([round(cost * rng.lognormvariate(0, 1)) for cost in costs])
    ways: dict[str, list[list[int] | None]] = {
        "an even number of layers": [even(len(costs), partitions) for costs, partitions in tables],
        "by parameters": [partition(counts, n) for counts, (_, n) in zip(parameters, tables)],
        "by time, torchgpipe 0.0.7": by_original(tables, limit),
        "by time, halving": [halved(costs, n) for costs, n in tables],
        "by time, balance_by_time": [partition(costs, n) for costs, n in tables],
    }
    ours = []
    progress = Progress(len(problems) // 100 + 1)
    for index, problem in enumerate(problems):
        if index % 100 == 0:
            progress("balances of 1F1B")
        ours.append(find_outcome(problem))
    rows = []
    for way, balances in ways.items():
        ratios = [
            problem.outcome(Choice(tuple(balance))).seconds / found.seconds
            for problem, balance, found in zip(problems, balances, ours, strict=True)
            if balance is not None and 0 not in balance
        ]
        empty = sum(balance is not None and 0 in balance for balance in balances)
        row = {"way": way, "tables": len(ratios), "empty": empty, "ratio": spread(ratios) if ratios else None}
        rows.append(row | {"slower": sum(ratio > 1 + NEAR for ratio in ratios)})
    return {"rows": rows}


def splits(args: argparse.Namespace) -> dict[str, Any]:
    """Return the answers to both questions.

    Args:
        args: `tables`, the number of random tables; `limit`, the seconds that the original may take for one of them
    """
    small = checked(max(1, args.tables // len(RESIDENT)))
    problems, misfits, near, wrong = (
        sum(row[key] for row in small) for key in ("problems", "misfits", "near", "wrong")
    )
    fitting = problems - misfits
    share = near / max(1, fitting)
    aims = [
        aim(f"small problems of {fitting} that fit whose answer is within 3% of the best, share", share, least=MOST),
        aim(f"small problems of {problems} in which what fits is not found", wrong, most=0),
    ]
    return {"checked": small, "compared": compared(args.tables, args.limit), "aims": aims}


def plan_optimal(result: dict[str, Any]) -> str:
    """Return a table of the small problems, all of whose choices were compared."""
    columns: dict[str, Any] = {
        "schedule": "schedule",
        "problems": "problems",
        "nothing fits": "misfits",
        "best found": "optimal",
        "within 3%": "near",
        "wrong": "wrong",
        "worst ratio": "worst:.3f",
    }
    return table_of(result["checked"], columns)


def plan_splits(result: dict[str, Any]) -> str:
    """Return a table of balances that are found in other ways."""
    columns: dict[str, Any] = {
        **{"balance": "way", "tables": "tables", "an empty partition": "empty", "slower than ours": "slower"},
        "median ratio": lambda row: f"{row['ratio']['median']:.3f}" if row["ratio"] else "-",
        "worst ratio": lambda row: f"{row['ratio']['high']:.3f}" if row["ratio"] else "-",
    }
    return table_of(result["compared"]["rows"], columns)
