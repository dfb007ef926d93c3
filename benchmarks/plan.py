"""Random models of three families (`plan_models.py`): what their plans predict, beside what is measured.

A turn plans for every model and runs the plan at once: the speed of a machine that others use changes within seconds,
so only times that were taken one right after the other are compared. All turns of all models start from the model
itself, and may choose differently. The figures mean nothing where other processes take a core.

    python -m benchmarks.plan                            # about 15 minutes on two idle cores
    python -m benchmarks.plan --show                     # only the tables
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers import Answer, Request, running, serve
from benchmarks.plan_models import FAMILIES, plan_of
from benchmarks.program import Part, Program, Progress
from benchmarks.records import Row, aim, spread, table_of
from tests.balancing.planning.peaks import activation_peaks

__all__ = ["PARTS"]

#: The largest difference of predicted / measured from 1: in the median, of nearly every model, and of activations.
MEDIAN, EACH, BYTES = 0.1, 0.2, 0.05

#: The share of the models for which `EACH` is aimed at.
MOST = 0.9


def answer(peer: str, request: Request) -> Answer:
    """Plan for a model and run the plan; return what was chosen, predicted and measured."""
    about, plan = plan_of(request)
    check = plan.check(about.model, steps=request["steps"])
    predicted, held = activation_peaks(plan, about.model)
    return {
        "layers": sum(plan.balance),
        "batch": about.batch,
        "choice": {
            **{"schedule": plan.schedule, "chunks": plan.chunks, "balance": plan.balance},
            "recomputed": len(plan.recomputed),
        },
        "predicted": check.predicted,
        "measured": check.seconds,
        "steps": list(check.measured),
        "predicted_bytes": predicted,
        "measured_bytes": held,
    }


# ---- The rows of the result.


def prediction(args: argparse.Namespace) -> dict[str, Any]:
    """Plan for every model in every turn, and run the plans. Each turn is a fresh process."""
    ask = {"shrink": args.shrink, "seconds": args.measure, "steps": args.steps}
    asked = [{**ask, "family": family, "seed": seed} for family in FAMILIES for seed in range(args.seeds)]
    answers: list[list[Answer]] = [[] for _ in asked]
    progress = Progress(args.turns * len(asked))
    for turn in range(args.turns):
        if turn and args.seconds.spent():
            break
        with running(["ours"], "plan.py") as peers:
            for request, answered in zip(asked, answers):
                progress(f"prediction: {request['family']} {request['seed']}")
                answered.append(peers["ours"].ask(request))
    rows = [row(request, answered) for request, answered in zip(asked, answers)]
    return {"rows": rows, **summary(rows)}


def row(request: Request, turns: Sequence[Answer]) -> Row:
    """Return the row of a model."""
    return {
        "model": f"{request['family']} {request['seed']}",
        "layers": turns[0]["layers"],
        "batch": turns[0]["batch"],
        "ratio": spread(turn["predicted"] / turn["measured"] for turn in turns),
        "off bytes": max(
            abs(apart(predicted, measured))
            for turn in turns
            for predicted, measured in zip(turn["predicted_bytes"], turn["measured_bytes"])
        ),
        "turns": list(turns),
    }


def apart(predicted: float, measured: float) -> float:
    """Return by which share a prediction is too large."""
    return predicted / measured - 1 if measured else math.inf if predicted else 0.0


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the aims, and the names of the models whose time is far off."""
    off = {row["model"]: abs(row["ratio"]["median"] - 1) for row in rows}
    beyond = [name for name, difference in off.items() if difference > EACH]
    exact = sum(row["off bytes"] <= BYTES for row in rows)
    within, least = len(rows) - len(beyond), math.ceil(MOST * len(rows))
    aims = [
        aim("predicted / measured step, off 1 in the median", statistics.median(off.values()), most=MEDIAN),
        aim(f"models of {len(rows)} whose step is predicted within 20%", within, least=least),
        aim("models that recompute nothing, activations predicted within 5% on every device", exact, least=len(rows)),
    ]
    return {"beyond": beyond, "aims": aims}


def plan_prediction(result: dict[str, Any]) -> str:
    """Return a table of the predicted and the measured step of each model; the choice is that of the last turn."""

    def of_last(key: str) -> Callable[[Row], Any]:
        return lambda row: row["turns"][-1]["choice"][key]

    def milliseconds(key: str) -> Callable[[Row], str]:
        return lambda row: f"{statistics.median(turn[key] for turn in row['turns']) * 1e3:.1f}"

    columns: dict[str, Any] = {
        **{"model": "model", "layers": "layers", "rows": "batch"},
        **{key: of_last(key) for key in ("schedule", "chunks")},
        "balance": lambda row: " ".join(map(str, of_last("balance")(row))),
        "recomputed": of_last("recomputed"),
        **{f"{key}, ms": milliseconds(key) for key in ("predicted", "measured")},
        "ratio": "ratio:2",
    }
    return table_of(result["rows"], columns)


PARTS = {
    "prediction": Part(
        "plan:prediction",
        prediction,
        {"predicted and measured steps": plan_prediction},
        lambda result: [f"more than 20% off: {', '.join(result['beyond']) or 'none'}"],
    )
}


def main() -> None:
    command = Program("plan", __doc__, PARTS, seconds="turn")
    command.add("--seeds", type=int, default=10, help="the models of each family")
    command.add("--shrink", type=int, default=1, help="how many times smaller mini-batches are")
    command.add("--measure", type=float, default=3.0, help="seconds that a plan measures")
    command.add("--turns", type=int, default=3)
    command.add("--steps", type=int, default=5, help="of a planned pipeline, in a turn")
    command.run()


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        serve(answer)
    else:
        main()
