"""A step of two partitions on two cores, beside PyTorch's own pipelines, naive placement and the plain model: parts of
training.py.

`step` trains an `nn.Sequential` with `GPipe.step`, `pipelined` a GPT-2, which is none, with
`torchgpipe.pipelined`. Each way runs in a process of its own, and PyTorch's pipelines in two. Two cores are shared
alike: each of two processes has one, and so has each of our two workers. All losses must agree, or there is no result.

    whole           the plain model, the whole mini-batch at once
    micro-batches   the plain model, one micro-batch after the other, in one thread
    naive           hooks move what a module is called with; one partition at a time, on the whole mini-batch
    call            `model(...)` and `loss.backward()` of a pipelined model
    1F1B, ...       `model.step(...)` under this schedule

PyTorch's pipelines have no checkpointing, so ours has it switched off.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.language_models import OURS
from benchmarks.peers import Answer, Case, Request
from benchmarks.program import ask_in_turn
from benchmarks.records import Row, aim, named_way, ratios, shown, spread_of_turns, table
from benchmarks.tasks import TASKS
from benchmarks.training_speed import KEEP_MEMORY

__all__ = ["pipelined", "pipelined_speed", "step", "step_speed"]

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

#: The ways of a pipelined model, its micro-batches, and the least that it should gain over naive placement.
WAYS = ("naive", "micro-batches", "call", "1F1B", "GPipe")
CHUNKS = 8
GAIN = 1.4


def verify_losses(model: str, answers: Mapping[str, list[Answer]]) -> None:
    """Check that all ways have trained the same.

    Raises:
        RuntimeError: the losses of two ways differ.
    """
    losses = {name: turn["loss"] for name, turns in answers.items() for turn in turns if "loss" in turn}
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= SAME * high:
        raise RuntimeError(f"the ways to train {model} have different losses: {losses}")


def medians(answers: Mapping[str, list[Answer]], key: str) -> dict[str, list[float]]:
    """Return by way the median of each turn."""
    return {way: [statistics.median(turn[key]) for turn in turns] for way, turns in answers.items()}


# ---- Steps of a `GPipe`.


def ways(args: argparse.Namespace, model: str, m: int) -> Case:
    """Return by name what is measured: the peer, and the request. The plain model runs on the first device."""
    shape = {"size": "step", "model": model, "batch": TASKS["step"][model].batch // args.shrink, "m": m}
    shape |= {"balance": BALANCES[model][2], "warm_up": min(2, args.steps), "steps": args.steps, "threads": 1}

    def asked(kind: str, **more: Any) -> Request:
        return {"kind": kind, **shape, "devices": [args.device], **more}

    on_cpu = args.device == "cpu"
    pairs = [("cpu:0", "cpu:1")] if on_cpu else [(args.device, args.device), (args.device, "cpu")]
    threads = {"whole, 1 thread": 1, "whole, 2 threads": 2} if on_cpu else {"whole": 1}
    case = {name: ("plain", asked("whole", threads=count)) for name, count in threads.items()}
    case["micro-batches"] = "plain", asked("micro-batches")
    for pair in pairs:
        for schedule, places in PLACES.items():
            if len(set(pair)) == 1 and len(places) > 2:  # All partitions are neighbours on one device.
                continue
            more = {"schedule": schedule, "balance": BALANCES[model][len(places)], "threads": 2}
            name = schedule if on_cpu else f"{schedule} on {', '.join(pair)}"
            case[name] = "ours", asked("step", devices=[pair[k] for k in places], **more)
    if on_cpu:
        for schedule in ALIKE.values():
            case[schedule] = schedule, asked("train", devices=["cpu", "cpu"])
    return case


def step(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways of a step, turn by turn."""
    asked = {(model, m): ways(args, model, m) for model in BALANCES if model in args.models for m in args.chunks}
    scripts = dict.fromkeys(("ours", "plain"), "training_steps.py") | dict.fromkeys(
        ALIKE.values(), "pytorch_pipelines.py"
    )
    cases = list(asked.values())
    answers = ask_in_turn(cases, scripts, args.turns, args.seconds.spent, environment=KEEP_MEMORY)
    rows = [step_row(args, model, m, answered) for (model, m), answered in zip(asked, answers)]
    return {"rows": rows, "aims": step_aims(rows) if args.device == "cpu" else []}


def step_row(args: argparse.Namespace, model: str, m: int, answers: dict[str, list[Answer]]) -> Row:
    """Return the row of a model in ``m`` micro-batches."""
    verify_losses(model, answers)
    row: Row = {"model": model, "m": m, "batch": TASKS["step"][model].batch // args.shrink}
    seconds = medians(answers, "seconds")
    plain = seconds["micro-batches"]
    row["seconds"] = {name: spread_of_turns(turns) for name, turns in seconds.items()}
    row["speed-up"] = {name: ratios(turns, plain) for name, turns in seconds.items() if name != "micro-batches"}
    if args.device == "cpu":
        row["over the same"] = {mine: ratios(seconds[mine], seconds[theirs]) for mine, theirs in ALIKE.items()}
        # The schedules that are the fastest in the median: the fastest in each turn would gain by chance.
        best = [min(names, key=lambda name: row["seconds"][name]["median"]) for names in (PLACES, ALIKE.values())]
        row["best"] = best
        row["best over best"] = ratios(seconds[best[0]], seconds[best[1]])
    return row


def step_aims(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the aims with what was reached: medians of ratios within a turn."""
    aims = []
    for name, theirs in ALIKE.items():
        over = [row["over the same"][name]["median"] for row in rows]
        aims.append(aim(f"{name} over {theirs}, geometric mean", geometric_mean(over), least=1.0))
        aims.append(aim(f"{name} over {theirs}, lowest row", min(over), least=0.92))
    best = geometric_mean([row["best over best"]["median"] for row in rows])
    aims.append(aim("best schedule over PyTorch's best, geometric mean", best, least=1.05))
    return aims


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def step_speed(result: dict[str, Any]) -> str:
    """Return a table of all ways of a step: milliseconds, and the speed-up over the plain micro-batches."""
    lines = []
    for row in result["rows"]:
        for name, seconds in row["seconds"].items():
            over = shown(row.get("over the same", {}).get(name), 2)
            up = shown(row["speed-up"].get(name), 2)
            lines.append([row["model"], row["m"], name, shown(seconds, 1, 1e3), up, over])
    return table(lines, ["model", "m", "step", "ms", "over micro-batches", "over PyTorch's own"])


# ---- A pipelined language model.


def language_request(args: argparse.Namespace, **more: Any) -> Request:
    """Return a request to the child."""
    shape = {
        "layers": max(2, 4 // args.shrink),
        "width": max(8, 512 // args.shrink),
        "context": max(4, 128 // args.shrink),
    }
    return {"model": "gpt2", **shape, "rows": 4, "m": CHUNKS, **more}


def pipelined(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways, turn by turn."""
    more = {"kind": "train", "warm_up": 1, "steps": args.steps}
    case: Case = {way: ("ours", language_request(args, way=way, **more)) for way in WAYS}
    (answers,) = ask_in_turn([case], "language_models.py", args.turns, args.seconds.spent, environment=KEEP_MEMORY)
    row = pipelined_row(args, answers)
    aims = [
        aim(f"{named_way(way)} over naive placement, two cores", row["over naive"][way]["median"], least=GAIN)
        for way in ("1F1B", "call")
    ]
    return {"rows": [row], "aims": aims}


def pipelined_row(args: argparse.Namespace, answers: dict[str, list[Answer]]) -> Row:
    verify_losses("gpt2", answers)
    seconds, cpu = (medians(answers, key) for key in ("seconds", "cpu"))
    naive, plain = seconds["naive"], seconds["micro-batches"]
    return {
        **language_request(args),
        "seconds": {way: spread_of_turns(turns) for way, turns in seconds.items()},
        "over naive": {way: ratios(turns, naive) for way, turns in seconds.items() if way != "naive"},
        "over micro-batches": {way: ratios(seconds[way], plain) for way in OURS},
        "cpu / micro-batches": {way: ratios(cpu["micro-batches"], cpu[way]) for way in cpu if way != "micro-batches"},
    }


def pipelined_speed(result: dict[str, Any]) -> str:
    """Return a table of all ways of a step."""
    columns = {
        "over naive": "over naive placement",
        "over micro-batches": "over micro-batches",
        "cpu / micro-batches": "CPU / micro-batches",
    }
    lines = [
        [row["model"], row["m"], named_way(way), shown(seconds, 0, 1e3)]
        + [shown(row[key].get(way), 2) for key in columns]
        for row in result["rows"]
        for way, seconds in row["seconds"].items()
    ]
    return table(lines, ["model", "m", "step", "ms", *columns.values()])
