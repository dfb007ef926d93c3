"""The cost of a timeline, with a recorder and without.

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

    python -m benchmarks.timeline                    # -> results/timeline.json, about two minutes
    python -m benchmarks.timeline --device cuda:0    # on a GPU, and on it and the CPU in turn
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

import torchgpipe
from benchmarks.cost import MODES, recomputed
from benchmarks.placement import threaded
from benchmarks.program import Command, Progress
from benchmarks.records import shown, spread, table
from torchgpipe import GPipe
from torchgpipe.engine.label import labelled
from torchgpipe.engine.record import recorded

#: The largest share of a cell that the idle questions may take, and recording of a cell whose runs take a millisecond.
IDLE_TARGET = 0.01
RECORDING_TARGET = 0.03

M, N = 8, 4


def pipeline(mode: str, threads: str, device: str) -> GPipe:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(N)])
    devices = threaded("ours", threads, N, device)
    return GPipe(layers, [1] * N, devices=devices, chunks=M, checkpoint=mode)


def cell(model: GPipe, x: Tensor, steps: int, context: AbstractContextManager[Any]) -> float:
    """Return the microseconds of CPU time of a cell."""
    with context:
        start = process_time()
        for _ in range(steps):
            model(x).sum().backward()
        return (process_time() - start) / (steps * M * N) * 1e6


class Asks:
    """The questions that an engine without a recorder asks."""

    _step = None

    def __init__(self) -> None:
        self.recorder = None

    def call(self) -> Any:
        if self.recorder is None:
            return labelled(None)
        raise AssertionError

    def cell(self) -> None:
        if self._step is not None:
            raise AssertionError

    def copy(self) -> None:
        with recorded(self._step, "copy", 0, 0, 1, None):
            pass
        with recorded(self._step, "wait", 0, 0, 1, None):
            pass


def seconds_of(question: Callable[[], object], count: int = 20_000) -> float:
    def nothing() -> None:
        pass

    def run(function: Callable[[], object]) -> float:
        start = perf_counter()
        for _ in range(count):
            function()
        return perf_counter() - start

    return max(0.0, min(run(question) for _ in range(5)) - min(run(nothing) for _ in range(5))) / count


def idle(threads: str) -> float:
    """Return the microseconds that a cell spends on asking for a recorder."""
    asks = Asks()
    call, cell, copy = (seconds_of(question) for question in (asks.call, asks.cell, asks.copy))
    copies = 0 if threads == "inline" else 2 * M * (N - 1)
    return (call + M * N * cell + copies * copy) / (M * N) * 1e6


def turn(mode: str, threads: str, device: str, pairs: int, steps: int) -> dict[str, float]:
    model, x = pipeline(mode, threads, device), torch.randn(2 * M, 4).to(device)
    times: dict[bool, list[float]] = {False: [], True: []}
    for k in range(-1, pairs):
        for records in (False, True) if k % 2 else (True, False):
            us = cell(model, x, steps, torchgpipe.record(model) if records else nullcontext())
            if k >= 0:  # The first pair warms up.
                times[records].append(us)
    return {
        "cell": statistics.median(times[False]),
        "added": statistics.median(with_ - without for without, with_ in zip(times[False], times[True])),
        "asked": idle(threads),
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each mode, in the caller's thread and through workers."""
    rows: list[dict[str, Any]] = []
    planned = [(threads, mode) for threads in ("inline", "workers") for mode in MODES]
    progress = Progress(len(planned))
    for k, (threads, mode) in enumerate(planned, 1):
        progress(f"{threads}, {mode}")
        turns: list[dict[str, float]] = []
        while len(turns) < args.turns and not (turns and args.seconds.spent(k / len(planned))):
            turns.append(turn(mode, threads, args.device, args.pairs, args.steps))
        figures = {name: spread(turn[name] for turn in turns) for name in turns[0]}
        rows.append({"threads": threads, "mode": mode, **figures})
    return rows


def recording_share(row: dict[str, Any]) -> float:
    """Return the share that recording adds to cells whose runs take a millisecond each."""
    added: float = row["added"]["median"]
    return added / (1000 * (2 + recomputed(row["mode"], M) / M))


def idle_share(row: dict[str, Any]) -> float:
    """Return the share of a cell that asking for a recorder takes."""
    share: float = row["asked"]["median"] / row["cell"]["median"]
    return share


def timeline(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        lines.append([row["threads"], row["mode"], shown(row["cell"]), shown(row["added"])])
        lines[-1] += [f"{recording_share(row):.1%}", shown(row["asked"], 2), f"{idle_share(row):.2%}"]
    header = ["threads", "mode", "cell, us", "recording adds, us", "of 1 ms a run", "idle, us", "of the cell"]
    return table(lines, header)


def show(result: dict[str, Any]) -> dict[str, str]:
    added, asked = (max(map(share, result["rows"])) for share in (recording_share, idle_share))
    return {
        "median of turns (lowest-highest turn)": timeline(result),
        f"recording at most {added:.1%} of runs of a millisecond (target: below {RECORDING_TARGET:.0%})": "",
        f"idle at most {asked:.2%} of a cell that does nothing (target: below {IDLE_TARGET:.0%})": "",
    }


def main() -> None:
    command = Command("timeline", __doc__, show=show, device=True, seconds="turn")
    command.add("--turns", type=int, default=5)
    command.add("--pairs", type=int, default=8, help="in a turn, with and without a recorder")
    command.add("--steps", type=int, default=10, help="in a row")
    args = command.parse()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.freeze()  # Objects that exist by now are not visited again, so collecting is cheap.
    about = {name: getattr(args, name) for name in ("device", "turns", "pairs", "steps")}
    unit = "us per cell of a micro-batch on a partition: forward, recomputation and backward"
    command.finish(unit=unit, size={"m": M, "n": N}, **about, rows=measure(args))


if __name__ == "__main__":
    main()
