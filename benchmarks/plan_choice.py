"""The planned way among all ways of a small space, measured in rounds; and the child that runs them.

The space: all balances of a few layers over two devices, in 4 and in 8 micro-batches, under three schedules, without
recomputation. Every round runs every way once, in an order of its own. The planned way is there twice: how far its two
medians are apart is the noise, and what another way is better by within the noise is not worth a word.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import torch

import torchgpipe
from benchmarks.peers import Answer, Request, running, serve
from benchmarks.plan_models import mean_of_squares, plan_model
from benchmarks.program import Progress
from benchmarks.records import aim, spread, table_of
from torchgpipe_balancing.planning.alternatives import problem_of
from torchgpipe_balancing.planning.measure import timed
from torchgpipe_balancing.planning.problem import Choice
from torchgpipe_balancing.planning.subject import Subject, Way, subject_of

__all__ = ["choice", "plan_choice"]

DEVICES = ("cpu:0", "cpu:1")
CHUNKS = (4, 8)
SCHEDULES: tuple[Any, ...] = ("GPipe", "1F1B", "ZeroBubble")

#: The layers of a model: more would have more ways than can be measured.
LAYERS = 6

#: The most that the planned way may take of the best, beyond the noise.
AIM = 1.03

#: A family and a seed of `plan_models.py`, each; of a Sequential, only the first layers.
MODELS = (("mlp", 100), ("mlp", 103), ("conv", 100), ("conv", 101))

#: The planned way, as it is called the second time.
AGAIN = "planned again"

Row = dict[str, Any]


def answer(peer: str, request: Request) -> Answer:
    """Plan for a model, and return the seconds of all ways, round by round, with what the plan predicts."""
    torch.set_num_threads(2)  # One for each of two devices.
    about = plan_model(request["family"], request["seed"], request["shrink"], layers=LAYERS)
    plan = torchgpipe.plan(
        about.model,
        about.sample,
        batch=about.batch,
        devices=DEVICES,
        optimizer=torch.optim.AdamW,
        loss_fn=mean_of_squares,
        schedule=SCHEDULES,
        chunks=CHUNKS,
        checkpoint=False,
        seconds=request["seconds"],
    )
    ways = {
        called(schedule, chunks, first): Way([first, LAYERS - first], plan.devices, chunks, schedule)
        for first in range(1, LAYERS)
        for chunks in CHUNKS
        for schedule in SCHEDULES
    }
    planned = called(plan.schedule, plan.chunks, plan.balance[0])
    subject = subject_of(about.model, about.sample, None, len(DEVICES), {"loss_fn": mean_of_squares})
    seconds = measured(subject, about.batch, {**ways, AGAIN: ways[planned]}, request["rounds"], request["steps"])
    return {
        "batch": about.batch,
        "planned": planned,
        "predicted": {name: predicted(plan, way) for name, way in ways.items()},
        "seconds": seconds,
    }


def called(schedule: str, chunks: int, first: int) -> str:
    return f"{schedule}, {chunks} chunks, {first} {LAYERS - first}"


def predicted(plan: torchgpipe.Plan, way: Way) -> float:
    """Return the seconds that the plan predicts of a way."""
    problem: Any = problem_of(plan.question, way.schedule, way.chunks)  # type: ignore[arg-type]
    return float(problem.predicted(problem.outcome(Choice(tuple(way.balance))).seconds))


def measured(subject: Subject, batch: int, ways: Mapping[str, Way], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return for each way the median seconds of a step in each round. One more step runs before them."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in Random(turn).sample(list(ways), len(ways)):
            model, step = subject.pipeline(ways[name])
            own = timed(partial(step, batch), ways[name].devices, 1 + steps, model)
            found[name].append(statistics.median(own[1:]))
    return found


# ---- The rows of the result.


def choice(args: argparse.Namespace) -> dict[str, Any]:
    """Plan for each model, and measure all ways; each model has a fresh process."""
    rows = []
    progress = Progress(len(MODELS))
    for family, seed in MODELS:
        progress(f"choice: {family} {seed}")
        request = {"family": family, "seed": seed, "shrink": args.shrink, "seconds": args.measure}
        with running(["ours"], "plan_choice.py") as peers:
            rows.append(row(request, peers["ours"].ask({**request, "rounds": args.rounds, "steps": 2})))
    reached = max(row["chosen/best"] - row["noise"] for row in rows)
    return {
        "rows": rows,
        "aims": [aim("planned way over the best of all, beyond the noise, highest model", reached, most=AIM)],
    }


def row(request: Request, found: Answer) -> Row:
    """Return the row of a model. Ratios are of medians over rounds."""
    middle = {name: statistics.median(own) for name, own in found["seconds"].items()}
    planned, again = middle[found["planned"]], middle.pop(AGAIN)
    best = min(middle, key=middle.__getitem__)
    others = sorted(middle.values())
    return {
        "model": f"{request['family']} {request['seed']}",
        "batch": found["batch"],
        "ways": len(middle),
        "planned": found["planned"],
        "best": best,
        "chosen/best": planned / middle[best],
        "noise": max(planned, again) / min(planned, again) - 1,
        "rank": 1 + others.index(planned),
        "median/best": statistics.median(others) / others[0],
        "worst/best": others[-1] / others[0],
        "ratio": spread(found["predicted"][name] / own for name, own in middle.items()),
        "predicted": found["predicted"],
        "seconds": {name: {**spread(own), "turns": own} for name, own in found["seconds"].items()},
    }


def plan_choice(result: dict[str, Any]) -> str:
    """Return a table of the planned way beside the best of all, and beside the others."""
    columns = {
        "model": "model",
        "planned": "planned",
        "best measured": "best",
        "rank": lambda row: f"{row['rank']} of {row['ways']}",
        "planned / best": "chosen/best:.3f",
        "noise": "noise:.3f",
        "median / best": "median/best:.2f",
        "worst / best": "worst/best:.2f",
    }
    return table_of(result["rows"], columns)


if __name__ == "__main__":
    serve(answer)
