"""Random models of three families: what their plans predict beside what is measured; and the child that plans.

A turn plans for every model and runs the plan at once: the speed of a machine that others use changes within seconds,
so only times that were taken one right after the other are compared. All turns of all models start from the model
itself, and may choose differently. Some models get less memory than the best choice without recomputation needs: the
first device, which holds two micro-batches under 1F1B, has room for 60% of its activations, or a little more if nothing
fits that; a model that recomputation does not help has no limit. The second device, which holds one micro-batch, has
what it needs: recomputation saves nothing there.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.peers import Answer, Request, running, serve
from benchmarks.plan_models import FAMILIES, plan_of
from benchmarks.program import Progress
from benchmarks.records import MIB, Row, aim, spread, table, table_of
from torchgpipe_balancing.planning.candidates import candidates

__all__ = ["plan_memory", "plan_prediction", "prediction"]

#: The largest difference of predicted / measured from 1: in the median, of nearly every model, and of activations.
MEDIAN, EACH, BYTES = 0.1, 0.2, 0.05

#: The share of the models for which `EACH` is aimed at.
MOST = 0.9

#: One of so many models gets a limit of its memory, if recomputation can keep it.
LIMITED = 3

#: The shares of the activations of the first device that may fit its limited memory; the first that is possible.
SHARES = (0.6, 0.7, 0.8, 0.9)

#: What models with a limit are planned with: smaller micro-batches would otherwise save the recomputation.
NARROW: dict[str, Any] = {"schedule": "1F1B", "chunks": 8}


def answer(peer: str, request: Request) -> Answer:
    """Return what a plan predicts and what is measured; or the memory of a model that has a limit."""
    if request["kind"] == "limit":
        return limit(request)
    more = {**NARROW, "memory": request["memory"]} if request["memory"] else {}
    about, plan = plan_of(request, **more)
    check = plan.check(about.model, steps=request["steps"])
    return {
        "layers": len(plan.input.costs.layers),
        "batch": about.batch,
        "choice": {
            **{"schedule": plan.schedule, "chunks": plan.chunks, "balance": plan.balance},
            "recomputed": len(plan.recomputed),
        },
        "predicted": check.predicted,
        "measured": check.seconds,
        "steps": list(check.measured),
        "predicted_bytes": list(check.predicted_bytes),
        "measured_bytes": list(check.measured_bytes),
    }


def limit(request: Request) -> Answer:
    """Return the memory of each device, and the share of the activations that the first has room for, if any."""
    _, plan = plan_of(request, **NARROW, checkpoint=False, margin=0.0)
    outcome, devices = plan.outcome(), plan.input.devices
    state = outcome.partitions[0].state
    for share in SHARES:
        memory = [state + share * (outcome.memory[0] - state), *outcome.memory[1:]]
        limited = tuple(replace(device, memory=size) for device, size in zip(devices, memory))
        if candidates(replace(plan.input, devices=limited, recomputes=True)):
            # The margin that plans leave by default is on top.
            return {"memory": [size / (1 - 0.1) * (1 + 1e-6) for size in memory], "share": share}
    return {}


# ---- The rows of the result.


def prediction(args: argparse.Namespace) -> dict[str, Any]:
    """Plan for every model in every turn, and run the plans. Each turn is a fresh process."""
    ask = {"shrink": args.shrink, "seconds": args.measure, "steps": args.steps}
    asked = [{**ask, "family": family, "seed": seed} for family in FAMILIES for seed in range(args.seeds)]
    answers: list[list[Answer]] = [[] for _ in asked]
    memories: list[Answer] = [{} for _ in asked]
    progress = Progress(args.turns * len(asked))
    for turn in range(args.turns):
        if turn and args.seconds.spent():
            break
        with running(["ours"], "plan_prediction.py") as peers:
            for k, request in enumerate(asked):
                progress(f"prediction: {request['family']} {request['seed']}")
                if not turn and request["seed"] % LIMITED == LIMITED - 1:
                    memories[k] = peers["ours"].ask({**request, "kind": "limit"})
                check = {"kind": "check", "memory": memories[k].get("memory")}
                answers[k].append(peers["ours"].ask({**request, **check}))
    rows = [row(request, *answered) for request, *answered in zip(asked, memories, answers)]
    return {"rows": rows, **summary(rows)}


def row(request: Request, memory: Answer, turns: Sequence[Answer]) -> Row:
    """Return the row of a model."""
    return {
        "model": f"{request['family']} {request['seed']}",
        "layers": turns[0]["layers"],
        "batch": turns[0]["batch"],
        "limit": memory.get("share"),
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
    least, median = math.ceil(MOST * len(rows)), statistics.median(off.values())
    free, limited = ([row["off bytes"] for row in rows if bool(row["limit"]) is kind] for kind in (False, True))
    exact = sum(difference <= BYTES for difference in free)
    within = len(rows) - len(beyond)
    aims = [
        aim("predicted / measured step, off 1 in the median", median, most=MEDIAN),
        aim(f"models of {len(rows)} whose step is predicted within 20%", within, least=least),
        aim("models that recompute nothing, activations predicted within 5% on every device", exact, least=len(free)),
    ]
    if limited:
        what = "predicted / counted activations where layers are recomputed, off 1, any device"
        aims.append(aim(what, max(limited), most=BYTES))
    return {"beyond": beyond, "aims": aims}


# ---- Tables.


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


def plan_memory(result: dict[str, Any]) -> str:
    """Return a table of the activations of the models with a limit, by device, and of the worst of the others."""
    rows = [row for row in result["rows"] if row["limit"]]
    lines = []
    for row in rows:
        last = row["turns"][-1]
        sizes = [" / ".join(f"{size / MIB:.2f}" for size in last[f"{key}_bytes"]) for key in ("predicted", "measured")]
        recomputed = f"{last['choice']['recomputed']} of {row['layers']}"
        lines.append([row["model"], f"{row['limit']:.0%}", recomputed, *sizes, f"{row['off bytes']:.1%}"])
    differences = [row["off bytes"] for row in result["rows"] if not row["limit"]]
    if differences:
        lines.append([f"{len(differences)} others", "-", "-", "-", "-", f"{max(differences):.1%}"])
    header = ["model", "memory", "recomputed", "predicted, MiB", "counted, MiB", "largest difference"]
    return table(lines, header)


if __name__ == "__main__":
    serve(answer)
