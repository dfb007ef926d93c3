"""What a timeline costs: while nobody records, and while somebody does.

Idle, the engine asks for a recorder once for each call, each cell and each copy. A pipeline without these questions
does not exist any more, so they are timed alone, as often as a step asks them, and put beside a step of cells that do
next to nothing. While recording, a step of cells of about a millisecond is timed with and without a recorder, in pairs,
every other pair the other way round, so that both sides see the same load; a turn's ratio is that of the lower
quartiles of its steps, since what is above them is the machine's. What recording adds to a cell, in microseconds, is
the difference of the lowest steps of cells that do next to nothing.

    python -m benchmarks.timeline      # -> results/timeline.json, about two minutes
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import torchgpipe
from benchmarks.records import RESULTS, environment, spread, table, write
from torchgpipe import GPipe
from torchgpipe.timeline.label import labelled
from torchgpipe.timeline.record import WhatIsRecorded, recorded

MODES = ("always", "except_last", "never")

#: The idle questions may take at most this share of a cell, and recording of a cell of about a millisecond.
IDLE_TARGET = 0.01
RECORDING_TARGET = 0.03

M, N = 8, 4


def pipeline(mode: str, threads: str, width: int) -> GPipe:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(N)])
    devices = ["cpu"] * N if threads == "inline" else [f"cpu:{j}" for j in range(N)]
    return GPipe(layers, [1] * N, devices=devices, chunks=M, checkpoint=mode)


def cells_of(mode: str) -> int:
    """How often layers run in a step, forward, again and backward."""
    return N * (2 * M + {"always": M, "except_last": M - 1, "never": 0}[mode])


def step(model: GPipe, x: Tensor, context: AbstractContextManager[Any]) -> float:
    """Seconds of a forward and backward; entering and leaving the context does not count."""
    model.zero_grad(set_to_none=True)
    with context:
        start = perf_counter()
        model(x).sum().backward()
        return perf_counter() - start


class Asks:
    """The questions of an engine that nobody listens to, as they stand there."""

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
        # Built before anybody is asked, and there are a copy and a wait.
        with recorded(self._step, WhatIsRecorded("copy", 0, 0, 1), None):
            pass
        with recorded(self._step, WhatIsRecorded("wait", 0, 0, 1), None):
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


def idle(mode: str, threads: str, steps: int) -> dict[str, float]:
    """The share of the questions in a step of tiny cells; copies are asked for though the CPU makes none."""
    model, x = pipeline(mode, threads, width=4), torch.randn(2 * M, 4)
    for _ in range(5):
        step(model, x, nullcontext())
    lowest = min(step(model, x, nullcontext()) for _ in range(steps))
    asks = Asks()
    call, cell, copy = (seconds_of(question) for question in (asks.call, asks.cell, asks.copy))
    copies = 2 * M * (N - 1)
    return {
        "cell us": lowest / (M * N) * 1e6,
        "asked us": (call + M * N * cell) / (M * N) * 1e6,
        "share": (call + M * N * cell) / lowest,
        "copy us": copy * 1e6,
        "share with copies": (call + M * N * cell + copies * copy) / lowest,
    }


def recording(mode: str, threads: str, rows: int, pairs: int) -> dict[str, float]:
    """How much longer a step takes, as a ratio, how long its cells are, and what recording adds to a tiny one."""
    times = _paired(pipeline(mode, threads, width=512), torch.randn(rows * M, 512), pairs)
    without, with_ = (statistics.quantiles(times[records], n=4)[0] for records in (False, True))
    tiny = _paired(pipeline(mode, threads, width=4), torch.randn(2 * M, 4), 3 * pairs)
    return {
        "cell ms": without / cells_of(mode) * 1e3,
        "ratio": with_ / without,
        "added us": (min(tiny[True]) - min(tiny[False])) / cells_of(mode) * 1e6,
    }


def _paired(model: GPipe, x: Tensor, pairs: int) -> dict[bool, list[float]]:
    """Seconds of steps without and with a recorder."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for k in range(-2, pairs):
        for records in (False, True) if k % 2 else (True, False):
            seconds = step(model, x, torchgpipe.record(model) if records else nullcontext())
            if k >= 0:  # The first pairs warm up.
                times[records].append(seconds)
    return times


def shown(figures: dict[str, float], digits: int) -> str:
    return f"{figures['median']:.{digits}f} ({figures['low']:.{digits}f}-{figures['high']:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20, help="of steps in a turn, with and without a recorder")
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch: what makes a cell a millisecond")
    parser.add_argument("--json", type=Path, default=RESULTS / "timeline.json")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.freeze()  # What is there by now is not looked at again: collecting is cheap.
    before = environment()
    rows: list[dict[str, Any]] = []
    for threads in ("inline", "workers"):
        for mode in MODES:
            idles = [idle(mode, threads, steps=50) for _ in range(args.turns)]
            turns = [recording(mode, threads, args.rows, args.pairs) for _ in range(args.turns)]
            rows.append(
                {
                    "mode": mode,
                    "threads": threads,
                    "idle": {name: spread(turn[name] for turn in idles) for name in idles[0]},
                    "recording": {name: spread(turn[name] for turn in turns) for name in turns[0]},
                }
            )
            print(f"{threads}, {mode} done", flush=True)

    header = ["threads", "mode", "cell, us", "idle, %", "with copies, %", "cell, ms", "recording, ratio", "added, us"]
    lines = [
        [
            row["threads"],
            row["mode"],
            shown(row["idle"]["cell us"], 1),
            *(shown({k: 100 * v for k, v in row["idle"][name].items()}, 2) for name in ("share", "share with copies")),
            shown(row["recording"]["cell ms"], 2),
            shown(row["recording"]["ratio"], 3),
            shown(row["recording"]["added us"], 1),
        ]
        for row in rows
    ]
    print("\nmedian of turns (lowest-highest turn)\n\n" + table(lines, header))
    idle_share = max(row["idle"]["share with copies"]["median"] for row in rows)
    recording_ratio = max(row["recording"]["ratio"]["median"] for row in rows)
    print(f"\nidle at most {idle_share:.2%} of a cell that does nothing (target: below {IDLE_TARGET:.0%})")
    print(f"recording at most {recording_ratio - 1:.1%} of a step (target: below {RECORDING_TARGET:.0%})")
    write(
        args.json,
        {
            "unit": "us and ms per cell; shares and ratios of a step",
            "environment": before,
            "size": {"m": M, "n": N},
            "turns": args.turns,
            "pairs": args.pairs,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
