"""The speed-up of a model on n devices, beside the ideal and torchgpipe 0.0.7: a part of training.py.

Experiments are named as torchgpipe's own: `naive-1` is the plain model on one device, the whole mini-batch at once (and
`micro-batches` the same in as many pieces as a pipeline gets, for small pieces take longer), and `pipeline-n` is a
pipeline of n partitions, balanced by time, in each checkpoint mode. All train the same model on the same mini-batch.

Speed-up is over `naive-1` in the same turn. The ideal is what the schedule allows, with partitions that take the same
time, and nothing else: of m + n - 1 clocks each device works m, and of a checkpointed micro-batch forward is computed
twice. The share of forward in a step is measured in `micro-batches`, or taken for a third if those are left out.

At the end stand the aims. On one device a pipeline should be nearly as fast as recomputation allows; no slower than the
original, and faster if the host is the limit. For the last aim there are a tiny GPT and a tiny MLP, which stay tiny at
every scale.

Where there are fewer devices than partitions, neighbours share one, and the ideal is for devices of their own. On a CPU
all partitions share it, and one thread runs them: there it shows what a pipeline costs, not what it gains.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.cost import MODES, ideal_speed_up
from benchmarks.peers import Answer, Case, Peer, Request, running
from benchmarks.placement import placed
from benchmarks.program import ask_in_turn
from benchmarks.records import ratios, shown, spread, table
from benchmarks.tasks import TASKS, TINY

__all__ = ["KEEP_MEMORY", "MODELS", "PARTITIONS", "PEERS", "measure", "speed", "speed_targets"]

PIPELINES = ("ours", "original")
PEERS = ("plain", *PIPELINES)
MODELS = tuple(TASKS["small"])
#: The plain model, one micro-batch after the other: what splitting costs without a pipeline.
SPLIT = "micro-batches"

#: One heap for all threads, which does not shrink, and nothing beside it: processes keep the memory that they have got
#: from the system, as PyTorch does on GPUs. Otherwise the C library hands large blocks back as soon as they are free,
#: from any thread but the first nearly all, and getting them again, page by page, can take as long as forward itself,
#: for one peer longer than for another. The GNU C library reads this, others do not.
KEEP_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_MAX_": "0"}

PARTITIONS = {"small": (1, 2), "gpu": (1, 4), "paper": (1, 2, 4, 8)}

#: By number of partitions the layers of each.
Balances = dict[int, list[int]]


def experiments(peers: list[str], partitions: list[int], modes: list[str]) -> Iterator[tuple[str, int, str, list[str]]]:
    """Yield the name, partitions, checkpoint mode and peers of each experiment."""
    if "plain" in peers:
        yield "naive-1", 1, "-", ["plain"]
        yield SPLIT, 1, "-", ["plain"]
    piped = [peer for peer in peers if peer in PIPELINES]
    for n in partitions:
        for mode in modes:
            if piped:
                yield f"pipeline-{n}", n, mode, piped


def batch_size(args: argparse.Namespace, model: str) -> int:
    """Return the number of samples in a mini-batch."""
    return TASKS[args.size][model].batch * (1 if model in TINY else args.scale)


def balances(peer: Peer, args: argparse.Namespace, model: str, partitions: list[int]) -> Balances:
    """Return the balance by time of ours for each number of partitions, for all peers."""
    request: Request = {
        "kind": "balance",
        "size": args.size,
        "model": model,
        "rows": max(1, batch_size(args, model) // TASKS[args.size][model].chunks),
        "device": args.devices[0],
        "partitions": partitions,
        "seconds": 0.5 if args.size == "small" else 3.0,
    }
    return dict(zip(partitions, peer.ask(request)["balances"], strict=True))


def request_for(
    args: argparse.Namespace, model: str, experiment: str, n: int, mode: str, balance: list[int] | None
) -> Request:
    """Return the request to a peer."""
    return {
        "kind": "train",
        "size": args.size,
        "model": model,
        "batch": batch_size(args, model),
        "m": TASKS[args.size][model].chunks,
        "mode": mode,
        "balance": balance,
        "split": experiment == SPLIT,
        "devices": placed(args.devices, n),
        "warm_up": 1 if args.size == "small" else 2,
        "steps": args.steps,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each peer's throughput in each experiment, turn by turn, one model after the other."""
    models = [name for name in MODELS if name in args.models]
    partitions = args.partitions or list(PARTITIONS[args.size])
    planned = list(experiments(args.peers, partitions, args.checkpoint))
    rows: list[dict[str, Any]] = []
    with running(dict.fromkeys([*args.peers, "ours"]), "training_steps.py", KEEP_MEMORY) as peers:
        for k, model in enumerate(models, 1):
            print(model)
            of_model = balances(peers["ours"], args, model, partitions)
            cases: list[Case] = [
                {peer: (peer, request_for(args, model, name, n, mode, of_model.get(n))) for peer in of_experiment}
                for name, n, mode, of_experiment in planned
            ]
            share = k / len(models)
            answers = ask_in_turn(cases, peers, args.turns, lambda share=share: args.seconds.spent(share))  # type: ignore[misc]
            chunks = TASKS[args.size][model].chunks
            rows += summary(model, batch_size(args, model), chunks, of_model, planned, answers)
    return {"unit": "samples/s", "rows": rows, "targets": targets(rows)}


def summary(
    model: str,
    batch: int,
    m: int,
    balances: Balances,
    planned: list[tuple[str, int, str, list[str]]],
    answers: list[dict[str, list[Answer]]],
) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    # Seconds of a step, by experiment and peer: the median of each turn.
    seconds = [
        {
            peer: [statistics.median(turn["seconds"]) for turn in turns]
            for peer, turns in answered.items()
            if all("seconds" in turn for turn in turns)
        }
        for answered in answers
    ]
    naive = seconds[0].get("plain") if planned[0][0] == "naive-1" else None
    forward = forward_share(
        [turn for (name, *_), turns in zip(planned, answers) if name == SPLIT for turn in turns["plain"]]
    )

    rows = []
    for (name, n, mode, peers), of_peers, answered in zip(planned, seconds, answers, strict=True):
        row: dict[str, Any] = {"model": model, "experiment": name, "mode": mode, "n": n, "m": m, "batch": batch}
        if mode in MODES:
            row["balance"] = balances[n]
            row["ideal"] = ideal_speed_up(n, m, mode, forward)
        for peer in peers:
            if peer not in of_peers:
                row[peer] = {"none": next(turn["none"] for turn in answered[peer] if "none" in turn)}
                continue
            row[peer] = {"throughput": spread(batch / turn for turn in of_peers[peer]), "seconds": of_peers[peer]}
            if naive is not None:
                row[peer]["speed-up"] = ratios(of_peers[peer], naive)
            if peer == "ours" and "original" in of_peers:
                row[peer]["over original"] = ratios(of_peers[peer], of_peers["original"])
        rows.append(row)
    return rows


def forward_share(turns: list[Answer]) -> float:
    """Return the share of forward in a step of the plain model."""
    shares = [part / whole for turn in turns for part, whole in zip(turn.get("forward", ()), turn.get("seconds", ()))]
    return statistics.median(shares) if shares else 1 / 3


# ---- The aims.

#: What is aimed at: a ratio of speeds, and of which.
AIMS = {
    "limit": (0.9, "of what recomputation allows on one device"),
    "split": (0.9, "of the same, the plain model being given micro-batches as well"),
    "original": (1.0, "times the speed of torchgpipe 0.0.7"),
    "host": (1.3, "times the speed of torchgpipe 0.0.7, where the host is the limit"),
}


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each aim with what was reached: medians of ratios, turn by turn."""
    reached = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        ours = [row for row in of_model if "throughput" in row.get("ours", {})]
        alone = [row for row in ours if row["experiment"] == "pipeline-1"]

        split = next((row["plain"] for row in of_model if row["experiment"] == SPLIT), {})
        for row in alone:
            if "speed-up" in row["ours"]:
                share = {key: value / row["ideal"] for key, value in row["ours"]["speed-up"].items()}
                reached.append(_target("limit", model, f"pipeline-1, {row['mode']}", share))
            if "seconds" in split:
                over = ratios(row["ours"]["seconds"], split["seconds"])
                share = {key: value / row["ideal"] for key, value in over.items()}
                reached.append(_target("split", model, f"pipeline-1, {row['mode']}", share))

        aim = "host" if model in TINY else "original"
        for row in ours:
            if "over original" in row["ours"]:
                where = f"{row['experiment']}, {row['mode']}"
                reached.append(_target(aim, model, where, row["ours"]["over original"]))
    return reached


def _target(aim: str, model: str, where: str, figures: dict[str, float]) -> dict[str, Any]:
    least, _ = AIMS[aim]
    met = figures["median"] >= least
    return {"aim": aim, "at least": least, "model": model, "where": where, "reached": figures, "met": met}


# ---- Tables of a result.


def speed(result: dict[str, Any]) -> str:
    """Return a table of median speed-ups over naive-1."""
    lines = []
    for row in result["rows"]:
        if row["experiment"] == "naive-1":
            continue
        lines.append([row[key] for key in ("model", "experiment", "mode")])
        lines[-1] += [f"{row['ideal']:.2f}" if "ideal" in row else "-"]
        lines[-1] += [_speed_up(row.get(name)) for name in PIPELINES]
        lines[-1] += [_median(row.get("ours", {}).get("over original"))]
        lines[-1] += [_speed_up(row.get("plain"))]
    header = ["model", "experiment", "checkpoint", "ideal", *PIPELINES, "ours/original", "plain"]
    return table(lines, header)


def _speed_up(answer: dict[str, Any] | None) -> str:
    if not answer:
        return "-"
    return f"- {answer['none']}" if "none" in answer else _median(answer.get("speed-up"))


def _median(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['median']:.2f}"


def speed_targets(result: dict[str, Any]) -> str:
    """Return a table: for each aim and model how often it was met, and the lowest and the highest."""
    lines, reached = [], result["targets"]
    for aim, (least, words) in AIMS.items():
        for model in dict.fromkeys(target["model"] for target in reached):
            of_aim = [target for target in reached if (target["aim"], target["model"]) == (aim, model)]
            if of_aim:
                of_aim.sort(key=lambda target: target["reached"]["median"])
                ends = [f"{shown(target['reached'], 2)}, {target['where']}" for target in (of_aim[0], of_aim[-1])]
                met = f"{sum(target['met'] for target in of_aim)} of {len(of_aim)}"
                lines.append([f"{least} {words}", model, met, *ends])
    return table(lines, ["aim, at least", "model", "met", "lowest", "highest"])
