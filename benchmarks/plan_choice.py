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

import torchgpipe
from benchmarks.peers import Answer, Request, running, serve
from benchmarks.plan_models import DEVICES, mean_of_squares, plan_of
from benchmarks.program import Progress
from benchmarks.records import Row, aim, spread, spread_of_turns, table_of
from torchgpipe_balancing.planning.candidates import problem_of
from torchgpipe_balancing.planning.measure import time_steps
from torchgpipe_balancing.planning.model_under_test import Config, ModelUnderTest, prepare_model
from torchgpipe_balancing.planning.problem import Choice

__all__ = ["choice", "plan_choice"]

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


def answer(peer: str, request: Request) -> Answer:
    """Plan for a model, and return the seconds of all ways, round by round, with what the plan predicts."""
    about, plan = plan_of(request, schedule=SCHEDULES, chunks=CHUNKS, checkpoint=False)
    ways = {
        called(schedule, chunks, first): Config([first, LAYERS - first], plan.devices, chunks, schedule)
        for first in range(1, LAYERS)
        for chunks in CHUNKS
        for schedule in SCHEDULES
    }
    planned = called(plan.schedule, plan.chunks, plan.balance[0])
    tested = prepare_model(about.model, about.sample, None, len(DEVICES), {"loss_fn": mean_of_squares})
    seconds = measured(tested, about.batch, {**ways, AGAIN: ways[planned]}, request["rounds"], request["steps"])
    return {
        "batch": about.batch,
        "planned": planned,
        "predicted": {name: predicted(plan, way) for name, way in ways.items()},
        "seconds": seconds,
    }


def called(schedule: str, chunks: int, first: int) -> str:
    return f"{schedule}, {chunks} chunks, {first} {LAYERS - first}"


def predicted(plan: torchgpipe.Plan, way: Config) -> float:
    """Return the seconds that the plan predicts of a way."""
    problem: Any = problem_of(plan.input, way.schedule, way.chunks)  # type: ignore[arg-type]
    return float(problem.predicted(problem.outcome(Choice(tuple(way.balance))).seconds))


def measured(
    tested: ModelUnderTest, batch: int, ways: Mapping[str, Config], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Return for each way the median seconds of a step in each round. One more step runs before them."""
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in Random(turn).sample(list(ways), len(ways)):
            model, step = tested.pipeline(ways[name])
            seconds = time_steps(partial(step, batch), ways[name].devices, 1 + steps, model)
            medians[name].append(statistics.median(seconds[1:]))
    return medians


# ---- The rows of the result.


def choice(args: argparse.Namespace) -> dict[str, Any]:
    """Plan for each model, and measure all ways; each model has a fresh process."""
    rows = []
    progress = Progress(len(MODELS))
    for family, seed in MODELS:
        progress(f"choice: {family} {seed}")
        request = {"family": family, "seed": seed, "shrink": args.shrink, "seconds": args.measure, "layers": LAYERS}
        with running(["ours"], "plan_choice.py") as peers:
            rows.append(row(request, peers["ours"].ask({**request, "rounds": args.rounds, "steps": 2})))
    reached = max(row["chosen/best"] - row["noise"] for row in rows)
    aims = [aim("planned way over the best of all, beyond the noise, highest model", reached, most=AIM)]
    return {"rows": rows, "aims": aims}


def row(request: Request, answer: Answer) -> Row:
    """Return the row of a model. Ratios are of medians over rounds."""
    middle = {name: statistics.median(seconds) for name, seconds in answer["seconds"].items()}
    planned, repeated = middle[answer["planned"]], middle.pop(AGAIN)
    best = min(middle, key=middle.__getitem__)
    ordered = sorted(middle.values())
    return {
        "model": f"{request['family']} {request['seed']}",
        "batch": answer["batch"],
        "ways": len(middle),
        "planned": answer["planned"],
        "best": best,
        "chosen/best": planned / middle[best],
        "noise": max(planned, repeated) / min(planned, repeated) - 1,
        "rank": 1 + ordered.index(planned),
        "median/best": statistics.median(ordered) / ordered[0],
        "worst/best": ordered[-1] / ordered[0],
        "ratio": spread(answer["predicted"][name] / seconds for name, seconds in middle.items()),
        "predicted": answer["predicted"],
        "seconds": {name: spread_of_turns(seconds) for name, seconds in answer["seconds"].items()},
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
