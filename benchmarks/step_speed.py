"""The time of a step on two cores: ours beside PyTorch's own pipelines, the plain model, and what two threads can do.

A turn asks all ways after each other, every other turn in reverse. Each way runs in a process of its own, and PyTorch's
pipelines in two. Two cores are shared alike: each of two processes has one, and so has each of our two workers.

    ideal     2 m / (m + 1): a device works 2 m of 2 (m + 1) clocks, in 'GPipe' as in '1F1B'
    limit     how much faster two threads train the halves of the layers than one thread, without a pipeline
    allowed   the ideal of two such threads: limit m / (m + 1)

PyTorch's pipelines have no checkpointing, so ours has it switched off. All losses must agree, or there is no result.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.peers import Answer, Request, running
from benchmarks.program import Progress
from benchmarks.records import ratios, spread
from benchmarks.speed import KEEP_MEMORY
from benchmarks.training import TASKS

__all__ = ["ALIKE", "machine", "speed"]

#: By model, the layers of two partitions and of four; halves take the same time.
BALANCES = {"mlp": {2: [4, 4], 4: [2, 2, 2, 2]}, "gpt": {2: [5, 6], 4: [3, 2, 2, 4]}}

#: Our schedules on two devices, by the indices of the devices.
PLACES = {
    "GPipe": [0, 1],
    "1F1B": [0, 1],
    "ZeroBubble": [0, 1],
    "Interleaved1F1B": [0, 1, 0, 1],
    "V-Half": [0, 1, 1, 0],
}

#: The same schedule, ours and PyTorch's.
ALIKE = {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"}

#: Losses in single precision that differ by more are not of the same training.
SAME = 1e-4


def request_for(args: argparse.Namespace, model: str, m: int, kind: str, **more: Any) -> Request:
    """Return a request to a child. The plain model runs on the first device."""
    batch = TASKS["step"][model].batch // args.shrink
    shape = {"size": "step", "model": model, "batch": batch, "m": m, "balance": BALANCES[model][2]}
    times = {"warm_up": min(2, args.steps), "steps": args.steps}
    return {"kind": kind, **shape, **times, "threads": 1, "devices": [args.device], **more}


def ways(args: argparse.Namespace, model: str, m: int) -> dict[str, tuple[str, Request]]:
    """Return by name what is measured: the peer, and the request."""
    pairs = [("cpu:0", "cpu:1")] if args.device == "cpu" else [(args.device, args.device), (args.device, "cpu")]
    threads = {"whole, 1 thread": 1, "whole, 2 threads": 2} if args.device == "cpu" else {"whole": 1}
    found = {name: ("plain", request_for(args, model, m, "whole", threads=count)) for name, count in threads.items()}
    found["micro-batches"] = "plain", request_for(args, model, m, "micro-batches")
    if args.device == "cpu":
        found["halves"] = "plain", request_for(args, model, m, "halves")
    for pair in pairs:
        for schedule, places in PLACES.items():
            devices = [pair[k] for k in places]
            if len(set(pair)) == 1 and len(places) > 2:  # All partitions are neighbours on one device.
                continue
            more = {"schedule": schedule, "balance": BALANCES[model][len(places)], "devices": devices, "threads": 2}
            name = schedule if args.device == "cpu" else f"{schedule} on {', '.join(pair)}"
            found[name] = "ours", request_for(args, model, m, "step", **more)
    if args.device == "cpu":
        for schedule in ALIKE.values():
            units = {"units": BALANCES[model][2], "devices": ["cpu", "cpu"]}
            found[schedule] = schedule, request_for(args, model, m, "train", **units)
    return found


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the halves of the layers alone: whether they take the same time, and what a second thread gains."""
    rows = []
    progress = Progress(len(args.models) * len(args.chunks))
    with running(["plain"], "step_training.py", KEEP_MEMORY) as peers:
        for model in args.models:
            for m in args.chunks:
                progress(f"halves of {model}, {m} micro-batches")
                request = request_for(args, model, m, "halves")
                rows.append({"model": model, "m": m, **limit([peers["plain"].ask(request) for _ in range(args.turns)])})
    return {"rows": rows}


def limit(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the spread of what two threads gain, and of the first half's time over the second's."""
    medians = [{name: statistics.median(one) for name, one in answer["seconds"].items()} for answer in answers]
    return {
        "limit": spread(turn["one"] / turn["two"] for turn in medians),
        "first/second": spread(turn["first"] / turn["second"] for turn in medians),
    }


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways of a step, turn by turn."""
    asked = {(model, m): ways(args, model, m) for model in args.models for m in args.chunks}
    answers: dict[tuple[str, int], dict[str, list[Answer]]] = {
        key: {name: [] for name in found} for key, found in asked.items()
    }
    progress = Progress(args.turns * len(asked))
    theirs = list(ALIKE.values()) if args.device == "cpu" else []
    with (
        running(["ours", "plain"], "step_training.py", KEEP_MEMORY) as own,
        running(theirs, "pytorch_pipelines.py", KEEP_MEMORY) as others,
    ):
        for turn in range(args.turns):
            if turn and args.seconds.spent():
                break
            for key, found in asked.items():
                progress(f"{key[0]}, {key[1]} micro-batches")
                for name, (peer, request) in list(found.items())[:: -1 if turn % 2 else 1]:
                    answers[key][name].append((own | others)[peer].ask(request))
    rows = [row(args, model, m, answers[model, m]) for model, m in asked]
    return {"rows": rows, "aims": aims(rows) if theirs else []}


def row(args: argparse.Namespace, model: str, m: int, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """Return the row of a model in ``m`` micro-batches."""
    verify_losses(model, answers)
    found: dict[str, Any] = {"model": model, "m": m, "batch": TASKS["step"][model].batch // args.shrink}
    bounds = limit(answers["halves"]) if "halves" in answers else {}
    seconds = {
        name: [statistics.median(turn["seconds"]) for turn in turns]
        for name, turns in answers.items()
        if name != "halves"
    }
    plain = seconds["micro-batches"]
    found |= {"ideal": 2 * m / (m + 1), **bounds}
    found["seconds"] = {name: {**spread(turns), "turns": turns} for name, turns in seconds.items()}
    found["speed-up"] = {name: ratios(turns, plain) for name, turns in seconds.items() if name != "micro-batches"}
    if bounds:
        gains = [
            statistics.median(turn["seconds"]["one"]) / statistics.median(turn["seconds"]["two"])
            for turn in answers["halves"]
        ]
        found["of allowed"] = {
            name: spread(b / a / (gain * m / (m + 1)) for a, b, gain in zip(seconds[name], plain, gains, strict=True))
            for name in ALIKE
        }
        found["over the same"] = {mine: ratios(seconds[mine], seconds[other]) for mine, other in ALIKE.items()}
        # The schedules that are the fastest in the median: the fastest in each turn would gain by chance.
        best = [min(names, key=lambda name: found["seconds"][name]["median"]) for names in (PLACES, ALIKE.values())]
        found["best"] = best
        found["best over best"] = ratios(seconds[best[0]], seconds[best[1]])
    return found


def verify_losses(model: str, answers: dict[str, list[Answer]]) -> None:
    """Check that all ways have trained the same.

    Raises:
        RuntimeError: the losses of two ways differ.
    """
    losses = {name: turn["loss"] for name, turns in answers.items() for turn in turns if "loss" in turn}
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= SAME * high:
        raise RuntimeError(f"the ways to train {model} have different losses: {losses}")


def aims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the aims of the issue with what was reached: medians of ratios within a turn."""
    found = []
    for name, other in ALIKE.items():
        over = [row["over the same"][name]["median"] for row in rows]
        found.append(aim(f"{name} over {other}, geometric mean", 1.0, mean(over)))
        found.append(aim(f"{name} over {other}, lowest row", 0.92, min(over)))
        allowed = [row["of allowed"][name]["median"] for row in rows]
        found.append(aim(f"{name} of what two threads allow, lowest row", 0.85, min(allowed)))
    best = [row["best over best"]["median"] for row in rows]
    found.append(aim("best schedule over PyTorch's best, geometric mean", 1.05, mean(best)))
    return found


def aim(what: str, least: float, reached: float) -> dict[str, Any]:
    return {"aim": what, "at least": least, "reached": reached, "met": reached >= least}


def mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))
