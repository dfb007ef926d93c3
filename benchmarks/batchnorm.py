"""Time of a deferred batch norm: ours and the original's, each beside a plain one on the same micro-batches.

Deferring the running statistics should cost next to nothing, because the kernel computes mean and variance of a
micro-batch anyway. The original computes them again, in passes over the data of its own. A mini-batch of shape
(32, 64, 56, 56) goes through the layer in m micro-batches, in training, without a pipeline around it. Both
layers of a process run in pairs, plain then deferred, then the other way round, so that a pair sees the same
load; a turn's ratio is the median over its pairs. `peers.py` explains the peers.

    python -m benchmarks.batchnorm      # -> results/batchnorm.json, about 3 minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Answer, Request, running, serve
from benchmarks.program import Command, Progress
from benchmarks.records import PARTS, shown, spread, table

SHAPE = (32, 64, 56, 56)
PEERS = ("ours", "original")
FIGURES = ("plain", "deferred", "ratio")

#: The largest ratio of our time to a plain batch norm's in forward that is aimed at.
TARGET = 1.3


def timed(norm: nn.Module, micro_batches: list[Tensor], grad: bool) -> dict[str, float]:
    """Return the milliseconds of a mini-batch."""
    start = perf_counter()
    outputs = [norm(part) for part in micro_batches]
    middle = perf_counter()
    if grad:
        torch.autograd.backward(outputs, outputs)
    end = perf_counter()
    return {"forward": (middle - start) * 1e3, "backward": (end - middle) * 1e3}


def answer(peer: str, request: Request) -> Answer:
    """Return, in the peer's process, the median time of both layers in each part, and the median ratio of pairs."""
    from torchgpipe.batchnorm import DeferredBatchNorm

    torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    m, grad = request["m"], request["grad"]
    plain = nn.BatchNorm2d(SHAPE[1])
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(nn.BatchNorm2d(SHAPE[1]), chunks=m)
    micro_batches = [part.requires_grad_(grad) for part in torch.randn(SHAPE).chunk(m)]

    pairs: list[dict[str, dict[str, float]]] = []
    with torch.set_grad_enabled(grad):
        for k in range(-1, request["pairs"]):
            layers = {"plain": plain, "deferred": deferred}
            for norm in layers.values():
                norm.zero_grad(set_to_none=True)
            order = list(layers) if k % 2 else list(layers)[::-1]
            times = {name: timed(layers[name], micro_batches, grad) for name in order}
            if k >= 0:  # The first pair warms up.
                pairs.append(times)
    result: Answer = {}
    for part in parts(grad):
        for name in ("plain", "deferred"):
            result[f"{part} {name}"] = statistics.median(pair[name][part] for pair in pairs)
        result[f"{part} ratio"] = statistics.median(pair["deferred"][part] / pair["plain"][part] for pair in pairs)
    return result


def parts(grad: bool) -> tuple[str, ...]:
    return PARTS if grad else PARTS[:1]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of micro-batches and each part, with and without gradients."""
    shapes = [{"m": m, "grad": grad} for grad in (True, False) for m in (1, 4, 8)]
    measured: list[dict[str, list[Answer]]] = [{name: [] for name in args.peers} for _ in shapes]
    progress = Progress(args.turns)
    for _ in range(args.turns):
        progress("turn")
        with running(args.peers, "batchnorm.py") as peers:
            for shape, answers in zip(shapes, measured, strict=True):
                for name, peer in peers.items():
                    answers[name].append(peer.ask({**shape, "threads": args.threads, "pairs": args.pairs}))
    return [
        {**shape, "part": part}
        | {
            name: {figure: spread(turn[f"{part} {figure}"] for turn in turns) for figure in FIGURES}
            for name, turns in answers.items()
        }
        for shape, answers in zip(shapes, measured, strict=True)
        for part in parts(bool(shape["grad"]))
    ]


def batchnorm(result: dict[str, Any]) -> str:
    peers = [name for name in PEERS if name in result["rows"][0]]
    lines = [
        [row["m"], "training" if row["grad"] else "no gradients", row["part"]]
        + [shown(row[name]["ratio"], 2) for name in peers]
        for row in result["rows"]
    ]
    return table(lines, ["micro-batches", "mode", "part", *peers])


def show(result: dict[str, Any]) -> dict[str, str]:
    told = {"deferred over plain, median of turns (lowest-highest)": batchnorm(result)}
    if "ours" in result["rows"][0]:
        worst = max(row["ours"]["ratio"]["median"] for row in result["rows"] if row["part"] == "forward")
        told[f"ours in forward: at most {worst:.2f} times plain (target: {TARGET})"] = ""
    return told


def main() -> None:
    command = Command("batchnorm", __doc__, show=show, peers=PEERS)
    command.add("--turns", type=int, default=5, help="each in fresh processes")
    command.add("--pairs", type=int, default=15, help="in a turn")
    command.add("--threads", type=int, default=1, help="of PyTorch")
    args = command.parse()
    about = {name: getattr(args, name) for name in ("threads", "turns", "pairs")}
    command.finish(unit="ms", shape=SHAPE, target=TARGET, **about, rows=measure(args))


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        serve(answer)
    else:
        main()
