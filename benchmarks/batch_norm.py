"""What a deferred batch norm costs: ours and the original's, each beside a plain one on the same micro-batches.

Deferring the running statistics should cost next to nothing, because the kernel computes mean and variance of a
micro-batch anyway; the original computes them again, in passes over the data of its own. A mini-batch of shape
(32, 64, 56, 56) goes through the layer in m micro-batches, without a pipeline around it. Both layers of a process run
in pairs, plain then deferred, then the other way round, so that a pair sees the same load; a turn's ratio is the median
over its pairs.

    python -m benchmarks.batch_norm  # three minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks.peers import Answer, Case, Request, serve
from benchmarks.program import Part, Program, ask_in_turn
from benchmarks.records import PASSES, Row, shown, spread, table_of

__all__ = ["PARTS"]

PEERS = ("ours", "original")
SHAPE = (32, 64, 56, 56)
FIGURES = ("plain", "deferred", "ratio")

#: Pairs of a turn.
PAIRS = 15

#: The largest ratio of our time to a plain batch norm's in forward that is aimed at.
TARGET = 1.3


def answer(peer: str, request: Request) -> Answer:
    """Return the median milliseconds of both layers in each part, and the median ratio of pairs."""
    from torchgpipe.batchnorm import DeferredBatchNorm

    torch.manual_seed(0)
    m, grad = request["m"], request["grad"]
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(nn.BatchNorm2d(SHAPE[1]), chunks=m)
    layers = {"plain": nn.BatchNorm2d(SHAPE[1]), "deferred": deferred}
    micro_batches = [part.requires_grad_(grad) for part in torch.randn(SHAPE).chunk(m)]

    def timed(norm: nn.Module) -> dict[str, float]:
        start = perf_counter()
        outputs = [norm(part) for part in micro_batches]
        middle = perf_counter()
        if grad:
            torch.autograd.backward(outputs, outputs)
        return {"forward": (middle - start) * 1e3, "backward": (perf_counter() - middle) * 1e3}

    pairs: list[dict[str, dict[str, float]]] = []
    with torch.set_grad_enabled(grad):
        for k in range(-1, request["pairs"]):
            for norm in layers.values():
                norm.zero_grad(set_to_none=True)
            times = {name: timed(layers[name]) for name in list(layers)[:: 1 if k % 2 else -1]}
            if k >= 0:  # The first pair warms up.
                pairs.append(times)
    result: Answer = {}
    for part in parts(grad):
        for name in layers:
            result[f"{part} {name}"] = statistics.median(pair[name][part] for pair in pairs)
        result[f"{part} ratio"] = statistics.median(pair["deferred"][part] / pair["plain"][part] for pair in pairs)
    return result


def parts(grad: bool) -> tuple[str, ...]:
    return PASSES if grad else PASSES[:1]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each number of micro-batches and each part, with and without gradients."""
    shapes: list[Row] = [{"m": m, "grad": grad} for grad in (True, False) for m in (1, 4, 8)]
    cases: list[Case] = [{name: (name, {"pairs": args.pairs, **shape}) for name in args.peers} for shape in shapes]
    measured = ask_in_turn(cases, "batch_norm.py", args.turns, args.seconds.spent, fresh=True)
    rows = [
        {**shape, "part": part}
        | {
            name: {figure: spread(turn[f"{part} {figure}"] for turn in turns) for figure in FIGURES}
            for name, turns in answers.items()
        }
        for shape, answers in zip(shapes, measured, strict=True)
        for part in parts(shape["grad"])
    ]
    return {"unit": "ms", "shape": SHAPE, "target": TARGET, "threads": 1, "pairs": args.pairs, "rows": rows}


def batchnorm(result: dict[str, Any]) -> str:
    columns: dict[str, Any] = {"micro-batches": "m"}
    columns |= {"mode": lambda row: "training" if row["grad"] else "no gradients", "part": "part"}
    for name in PEERS:
        if name in result["rows"][0]:
            columns[name] = lambda row, name=name: shown(row[name]["ratio"], 2)
    return table_of(result["rows"], columns)


def notes(result: dict[str, Any]) -> Iterator[str]:
    if "ours" in result["rows"][0]:
        worst = max(row["ours"]["ratio"]["median"] for row in result["rows"] if row["part"] == "forward")
        yield f"ours in forward: at most {worst:.2f} times plain (target: {TARGET})"


PARTS = {
    "batch_norm": Part(
        "batchnorm", measure, {"deferred over plain, median of turns (lowest-highest)": batchnorm}, notes
    )
}


def main() -> None:
    program = Program("batch_norm", __doc__, PARTS, peers=PEERS, seconds="turn")
    program.add("--turns", type=int, default=3)
    program.add("--pairs", type=int, default=PAIRS, help="in a turn")
    program.run()


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        torch.set_num_threads(1)
        serve(answer)
    else:
        main()
