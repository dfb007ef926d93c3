"""What a timeline costs a cell, with a recorder and without: a part of host_time.py.

Both costs are in microseconds a cell, for pipelines of cells that do next to nothing. A cell is one micro-batch on one
partition: forward, recomputation and backward together.

Recording: the CPU time of all threads for some steps in a row, with a recorder and without, in turn; every other pair
runs the other way round. A figure is the median difference of a turn's pairs, over all cells. Entering and leaving the
block does not count. The share is that of cells whose runs (forward, recomputation, backward) take a millisecond each:
what is added does not depend on how long the layers take.

Idle: the engine asks for a recorder once for each call and cell, and for each copy and wait. There is no pipeline
without these questions to compare with, so the questions are timed alone and multiplied by their number in a step.
Inline there are no copies. Workers are counted with those that they make between accelerators, though CPUs share a
memory.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from time import process_time
from timeit import repeat
from typing import Any

import torch
from torch import nn

import torchgpipe
from benchmarks.cost import MODES, recomputed
from benchmarks.placement import threaded
from benchmarks.program import Progress
from benchmarks.records import spread, table_of
from torchgpipe import GPipe
from torchgpipe.engine.label import labelled
from torchgpipe.engine.record import recorded

__all__ = ["measure", "notes", "recording_share", "timeline"]

#: The largest share of a cell that the idle questions may take, and recording of a cell whose runs take a millisecond.
IDLE_TARGET = 0.01
RECORDING_TARGET = 0.03

M, N = 8, 4
#: Pairs of a turn, with and without a recorder.
PAIRS = 8


#: What an engine without a recorder is asked.
RECORDER = STEP = None


def ask_of_copy() -> None:
    for kind in ("copy", "wait"):
        with recorded(STEP, kind, 0, 0, 1, None):
            pass


def seconds_of(question: Callable[[], object], count: int = 20_000) -> float:
    asked, nothing = (min(repeat(function, number=count)) for function in (question, lambda: None))
    return max(0.0, asked - nothing) / count


def idle(threads: str) -> float:
    """Return the microseconds that a cell spends on asking for a recorder: at each call, cell, copy and wait."""
    call = seconds_of(lambda: labelled(None) if RECORDER is None else None)
    cell, copy = seconds_of(lambda: STEP is not None), seconds_of(ask_of_copy)
    copies = 0 if threads == "inline" else 2 * M * (N - 1)
    return (call + M * N * cell + copies * copy) / (M * N) * 1e6


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
        "asked": idle(threads),
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


def idle_share(row: dict[str, Any]) -> float:
    """Return the share of a cell that asking for a recorder takes."""
    share: float = row["asked"]["median"] / row["cell"]["median"]
    return share


def timeline(result: dict[str, Any]) -> str:
    columns: dict[str, Any] = {
        **{"threads": "threads", "mode": "mode", "cell, us": "cell", "recording adds, us": "added"},
        "of 1 ms a run": lambda row: f"{recording_share(row):.1%}",
        "idle, us": "asked:2",
        "of the cell": lambda row: f"{idle_share(row):.2%}",
    }
    return table_of(result["rows"], columns)


def notes(result: dict[str, Any]) -> list[str]:
    added, asked = (max(map(share, result["rows"])) for share in (recording_share, idle_share))
    return [
        f"recording at most {added:.1%} of runs of a millisecond (target: below {RECORDING_TARGET:.0%})",
        f"idle at most {asked:.2%} of a cell that does nothing (target: below {IDLE_TARGET:.0%})",
    ]
