"""`torchgpipe.pipelined`: beside the plain model, naive placement, and splitting by export.

    host        the host time of a call of a module of the spine, and of a micro-batch (`pipelined_host.py`)
    sleeping    blocks that sleep: simulated over measured time (`pipelined_steps.py`)
    memory      the activations that each device keeps (`pipelined_steps.py`)
    speed       language models on two cores (`pipelined_speed.py`)
    splits      whether export can split them (`pipelined_speed.py`)
    proof       what the proof takes, for GPT-2 (`pipelined_proof.py`)

Each part can be run by itself; parts that were measured before stay in the result. Figures are medians over turns, and
ratios are taken within a turn. `speed` means nothing where other processes take a core.

    python -m benchmarks.pipelined                       # all parts, about 20 minutes on two idle cores
    python -m benchmarks.pipelined --only host sleeping
    python -m benchmarks.pipelined --draw                # only the tables
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.pipelined_host import host, pipelined_host, pipelined_times
from benchmarks.pipelined_models import language_models
from benchmarks.pipelined_proof import pipelined_proof, proof
from benchmarks.pipelined_speed import pipelined_speed, pipelined_splits, speed, splits
from benchmarks.pipelined_steps import memory, pipelined_memory, pipelined_sleeping, sleeping
from benchmarks.program import Command
from benchmarks.step import step_aims as pipelined_aims

__all__ = [
    "pipelined_aims",
    "pipelined_host",
    "pipelined_memory",
    "pipelined_proof",
    "pipelined_sleeping",
    "pipelined_speed",
    "pipelined_splits",
    "pipelined_times",
]

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "host": host,
    "sleeping": sleeping,
    "memory": memory,
    "speed": speed,
    "splits": splits,
    "proof": proof,
}


def show(result: dict[str, Any]) -> dict[str, str]:
    told = {
        "host time beyond the plain model": pipelined_host(result),
        "host time of a micro-batch": pipelined_times(result),
        "blocks that sleep": pipelined_sleeping(result),
        "activations": pipelined_memory(result),
        "language models on two cores": pipelined_speed(result),
        "splitting": pipelined_splits(result),
        "the proof": pipelined_proof(result),
        "what was aimed at": pipelined_aims(result),
    }
    return {title: text for title, text in told.items() if text}


def main() -> None:
    command = Command("pipelined", __doc__, show=show, seconds="turn")
    command.add("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these parts; all by default")
    command.add("--models", nargs="+", choices=("gpt", "gpt2"), default=language_models(), help="of speed and splits")
    command.add("--blocks", type=int, default=4, help="of a language model")
    command.add("--width", type=int, default=512, help="of a language model")
    command.add("--context", type=int, default=128, help="the length of its inputs")
    command.add("--rows", type=int, default=4, help="of its micro-batches")
    command.add("--chunks", type=int, default=8, help="m, of speed")
    command.add("--layers", nargs=2, type=int, default=[4, 32], metavar=("FEW", "MANY"), help="of host")
    command.add("--micro-batches", type=int, default=32, help="m, of host")
    command.add("--no-export", dest="export", action="store_false", help="leave a split by export out of host")
    command.add("--partitions", nargs="+", type=int, default=[2, 4], help="n, the devices of blocks that sleep")
    command.add("--sleeping", type=int, default=16, metavar="M", help="m, of sleeping and memory")
    command.add("--sleep", type=float, default=0.04, help="seconds that a device sleeps in F, in I and in W")
    command.add("--turns", type=int, default=5)
    command.add("--steps", type=int, default=3, help="in a turn")
    command.add("--draw", action="store_true", help="measure nothing, print the tables of the JSON that is there")
    args = command.parse()
    command.finish_parts(PARTS, args.only, args, turns=args.turns, steps=args.steps)


if __name__ == "__main__":
    main()
