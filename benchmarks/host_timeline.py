"""What recording a timeline costs a cell: a part of host_time.py.

The cost is in microseconds a cell, for pipelines of cells that do next to nothing. A cell is one micro-batch on one
partition: forward, recomputation and backward together.

What is taken is the CPU time of all threads for some steps in a row, with a recorder and without, in turn; every other
pair runs the other way round. A figure is the median difference of a turn's pairs, over all cells. Entering and leaving
the block does not count. The share is that of cells whose runs (forward, recomputation, backward) take a millisecond
each: what is added does not depend on how long the layers take.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from contextlib import nullcontext
from time import process_time
from typing import Any

import torch
from torch import nn

import torchgpipe
from benchmarks.cost import MODES, recomputed
from benchmarks.placement import threaded
from benchmarks.program import Progress
from benchmarks.records import spread, table_of
from torchgpipe import GPipe

__all__ = ["measure", "notes", "recording_share", "timeline"]

#: The largest share that recording may take of a cell whose runs take a millisecond.
RECORDING_TARGET = 0.03

M, N = 8, 4
#: Pairs of a turn, with and without a recorder.
PAIRS = 8


def turn(mode: str, threads: str, device: str, steps: int) -> dict[str, float]:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(N)])
    devices = threaded("ours", threads, N, device)
    model, x = GPipe(layers, [1] * N, devices=devices, chunks=M, checkpoint=mode), torch.randn(2 * M, 4).to(device)
    times: dict[bool, list[float]] = {False: [], True: []}
    for k in range(-1, PAIRS):
        for records in (False, True) if k % 2 else (True, False):
            with torchgpipe.record(model) if records else nullcontext():
                start = process_time()
                for _ in range(steps):
                    model(x).sum().backward()
                microseconds = (process_time() - start) / (steps * M * N) * 1e6
            if k >= 0:  # The first pair warms up.
                times[records].append(microseconds)
    return {
        "cell": statistics.median(times[False]),
        "added": statistics.median(with_ - without for without, with_ in zip(times[False], times[True])),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each mode, in the caller's thread and through workers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.freeze()  # Objects that exist by now are not visited again, so collecting is cheap.
    rows: list[dict[str, Any]] = []
    planned = [(threads, mode) for threads in ("inline", "workers") for mode in MODES]
    progress = Progress(len(planned))
    for k, (threads, mode) in enumerate(planned, 1):
        progress(f"timeline, {threads}, {mode}")
        turns: list[dict[str, float]] = []
        while len(turns) < args.turns and not (turns and args.seconds.spent(k / len(planned))):
            turns.append(turn(mode, threads, args.device, 2 * args.steps))
        figures = {name: spread(turn[name] for turn in turns) for name in turns[0]}
        rows.append({"threads": threads, "mode": mode, **figures})
    unit = "us per cell of a micro-batch on a partition: forward, recomputation and backward"
    return {"unit": unit, "size": {"m": M, "n": N}, "rows": rows}


def recording_share(row: dict[str, Any]) -> float:
    """Return the share that recording adds to cells whose runs take a millisecond each."""
    added: float = row["added"]["median"]
    return added / (1000 * (2 + recomputed(row["mode"], M) / M))


def timeline(result: dict[str, Any]) -> str:
    columns: dict[str, Any] = {
        **{"threads": "threads", "mode": "mode", "cell, us": "cell", "recording adds, us": "added"},
        "of 1 ms a run": lambda row: f"{recording_share(row):.1%}",
    }
    return table_of(result["rows"], columns)


def notes(result: dict[str, Any]) -> list[str]:
    added = max(map(recording_share, result["rows"]))
    return [f"recording at most {added:.1%} of runs of a millisecond (target: below {RECORDING_TARGET:.0%})"]
