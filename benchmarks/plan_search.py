"""How long the search for a plan takes: 100 random layers on 8 devices.

A question asks for all schedules and numbers of micro-batches, as a plan does, with less memory from row to row:
shares of what the best choice without any limit needs.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from random import Random
from time import process_time
from typing import Any

from benchmarks.balance import random_costs
from benchmarks.program import Progress
from benchmarks.records import table_of
from torchgpipe_balancing.planning.candidates import Candidate, PlanInput, candidates
from torchgpipe_balancing.planning.costs import Costs, LayerCosts
from torchgpipe_balancing.planning.problem import CellCosts, Device, Layer

__all__ = ["plan_search", "search"]

#: Of the costs of `benchmarks.balance`: very uneven layers, and blocks that repeat.
KINDS = ("lognormal", "blocks")

#: Shares of the memory that the best choice takes where there is no limit.
SHARES = (math.inf, 0.9, 0.7, 0.5)

#: The rows of a mini-batch, and of the micro-batches that costs are known for.
BATCH, ROWS = 128, (1, 4, 16)


def random_question(size: int, devices: int, kind: str, seed: int = 0) -> PlanInput:
    """Return a question about random layers without a limit of memory."""
    rng = Random(f"{kind} {seed}")
    layers = []
    for k, cost in enumerate(random_costs(kind, rng, size)):
        backward, kept = rng.uniform(1.5, 2.5), rng.randint(1, 50) << 16
        shared = kept // rng.randint(2, 8)

        samples = []
        for rows in ROWS:
            forward = cost * rows * 1e-6
            halves = backward * forward / 2
            times = forward, 2 * halves, halves, halves
            samples.append(Layer(*times, kept=kept * rows, again=shared * rows, input=shared * rows))
        parameters = rng.randint(1, 50) << 16
        layers.append(LayerCosts((str(k),), parameters, parameters, 0, tuple(samples)))
    cells = tuple(CellCosts(*[2e-5] * 4) for _ in ROWS)
    costs = Costs(tuple(layers), ROWS, cells, 5e-6, 1e-10, "random", "none")
    return PlanInput(costs, tuple(Device(str(k)) for k in range(devices)), BATCH, 3.0)


def search(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each question: seconds, and the step, for each kind of costs and each limit.

    Args:
        args: `search`, the numbers of layers and devices
    """
    rows = []
    progress = Progress(len(KINDS))
    for kind in KINDS:
        progress(f"{args.search[0]} layers on {args.search[1]} devices: {kind}")
        question = random_question(*args.search, kind)
        needs = math.inf
        for share in SHARES:
            if share < math.inf:
                limited = tuple(replace(device, memory=share * needs) for device in question.devices)
                question = replace(question, devices=limited)
            start = process_time()
            tried = candidates(question)
            seconds = process_time() - start
            if share == math.inf:
                needs = max(tried[0].memory)
            rows.append({"kind": kind, "memory": None if share == math.inf else share, **told(tried, seconds)})
    return {"rows": rows}


def told(tried: list[Candidate], seconds: float) -> dict[str, Any]:
    best = tried[0] if tried else None
    return {
        "seconds": seconds,
        "fitting": len(tried),
        "schedule": best and f"{best.schedule}, {best.chunks} chunks",
        "recomputed": best and len(best.choice.recomputed),
        "step": best and best.seconds,
        "balances": len(tried),
    }


def plan_search(result: dict[str, Any]) -> str:
    """Return a table of the questions."""
    columns: dict[str, Any] = {
        "costs": "kind",
        "memory": lambda row: "no limit" if row["memory"] is None else f"{row['memory']:.0%}",
        "search, CPU s": "seconds:.2f",
        "balances simulated": "balances",
        "chosen": "schedule",
        "layers recomputed": "recomputed",
        "step, s": lambda row: "-" if row["step"] is None else f"{row['step']:.3f}",
    }
    return table_of(result["rows"], columns)
