"""Time of a deferred batch norm: ours and the original's, each beside a plain one on the same micro-batches.

Deferring the running statistics is to cost next to nothing, for the kernel has taken mean and variance of a
micro-batch anyway. The original takes them again, in passes over the data of its own. A mini-batch of shape
(32, 64, 56, 56) goes through the layer in m micro-batches, in training, without a pipeline around it. Both
layers of a process run in pairs, plain then deferred, then the other way round, so that a pair sees the same
load; a turn's ratio is the median over its pairs. `peers.py` tells who the peers are.

    python -m benchmarks.batchnorm      # -> results/batchnorm.json, about 3 minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Answer, Peer, Request, serve
from benchmarks.records import RESULTS, environment, shown, spread, table, write

SHAPE = (32, 64, 56, 56)
PARTS = ("forward", "backward")

#: Ours is to need at most this many times the time of a plain batch norm in forward.
TARGET = 1.3


def timed(norm: nn.Module, micro_batches: list[Tensor], grad: bool) -> dict[str, float]:
    """Milliseconds of a mini-batch."""
    start = perf_counter()
    outputs = [norm(part) for part in micro_batches]
    middle = perf_counter()
    if grad:
        torch.autograd.backward(outputs, outputs)
    end = perf_counter()
    return {"forward": (middle - start) * 1e3, "backward": (end - middle) * 1e3}


def answer(peer: str, request: Request) -> Answer:
    """In the peer's process: of each part the median time of both layers, and the median ratio of pairs."""
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
    for part in PARTS if grad else PARTS[:1]:
        for name in ("plain", "deferred"):
            result[f"{part} {name}"] = statistics.median(pair[name][part] for pair in pairs)
        ratios = [pair["deferred"][part] / pair["plain"][part] for pair in pairs]
        result[f"{part} ratio"] = statistics.median(ratios)
    return result


def measure(asked: list[Request], peers: list[str], turns: int) -> list[dict[str, list[Answer]]]:
    """For each request, by peer, one answer a turn."""
    measured: list[dict[str, list[Answer]]] = [{name: [] for name in peers} for _ in asked]
    for turn in range(turns):
        with ExitStack() as stack:
            running = {name: stack.enter_context(Peer(name, Path(__file__).name)) for name in peers}
            for request, answers in zip(asked, measured, strict=True):
                for name, peer in running.items():
                    answers[name].append(peer.ask(request))
        print(f"turn {turn + 1} of {turns} done", flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="each in fresh processes")
    parser.add_argument("--pairs", type=int, default=15, help="in a turn")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--peers", nargs="+", choices=("ours", "original"), default=["ours", "original"])
    parser.add_argument("--json", type=Path, default=RESULTS / "batchnorm.json")
    args = parser.parse_args()

    common = {"threads": args.threads, "pairs": args.pairs}
    asked = [{"m": m, "grad": grad, **common} for grad in (True, False) for m in (1, 4, 8)]
    columns = ("plain", "deferred", "ratio")
    before = environment()
    rows: list[dict[str, Any]] = []
    for request, answers in zip(asked, measure(asked, args.peers, args.turns), strict=True):
        for part in PARTS if request["grad"] else PARTS[:1]:
            row: dict[str, Any] = {"m": request["m"], "grad": request["grad"], "part": part}
            for name, turns in answers.items():
                row[name] = {column: spread(turn[f"{part} {column}"] for turn in turns) for column in columns}
            rows.append(row)

    header = ["grad", "m", "part", *(f"{name}, {column}" for name in args.peers for column in columns)]
    lines = [
        ["yes" if row["grad"] else "no", row["m"], row["part"]]
        + [shown(row[name][column], 2) for name in args.peers for column in columns]
        for row in rows
    ]
    print(f"\nms for a mini-batch of {SHAPE}: median of turns (low-high)\n\n" + table(lines, header))
    if "ours" in args.peers:
        worst = max(row["ours"]["ratio"]["median"] for row in rows if row["part"] == "forward")
        met = "met" if worst <= TARGET else "MISSED"
        print(f"\nours in forward: at most {worst:.2f} times plain ({TARGET}: {met})")
    content = {"unit": "ms", "environment": before, "shape": SHAPE, "target": TARGET, "rows": rows}
    write(args.json, {**content, "threads": args.threads, "turns": args.turns, "pairs": args.pairs})


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        serve(answer)
    else:
        main()
