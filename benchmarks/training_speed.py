"""The speed-up of a model on n devices, beside the ideal and beside other libraries: a part of training.py.

Experiments are named as torchgpipe's own: `naive-1` is the plain model on one device, the whole mini-batch at once (and
`micro-batches` the same in as many pieces as a pipeline gets, for small pieces take longer), and `pipeline-n` is a
pipeline of n partitions, balanced by time, in each checkpoint mode. PyTorch's `checkpoint_sequential` is the other way
to save memory by recomputation, on one device; it can divide a model only where no skip passes, and here it makes as
many pieces as the root of the number of those places. It keeps the activations of the model's last piece, as a pipeline
with 'except_last' keeps those of the last micro-batch. So it is compared with pipelines of few micro-batches: two (`2
micro-batches`), or as many as it has pieces (`k micro-batches`). PyTorch's pipelines, `ScheduleGPipe` and
`Schedule1F1B` of torch.distributed.pipelining, take a process for each partition, are cut at the same places, and know
no checkpointing. All train the same model on the same mini-batch.

Speed-up is over `naive-1` in the same turn. The ideal is what the schedule allows, with partitions that take the same
time, and nothing else: of m + n - 1 clocks each device works m, and of a checkpointed micro-batch forward is computed
twice. The share of forward in a step is measured in `micro-batches`, or taken for a third if those are left out.

Beside the times stand the memory of a step on one device (`memory_steps.py`) and, at the end, the aims. On one device a
pipeline should be nearly as fast as recomputation allows; no slower than `checkpoint_sequential` in equal memory, to a
thousandth; no slower than the original, and faster if the host is the limit. For the last aim there are a tiny GPT and
a tiny MLP, which stay tiny at every scale.

Where there are fewer devices than partitions, neighbours share one, and the ideal is for devices of their own. On a CPU
all partitions share it, and one thread runs them: there it shows what a pipeline costs, not what it gains.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.cost import MODES, ideal_speed_up
from benchmarks.peers import Answer, Case, Peer, Request, running
from benchmarks.pictures import Curve, panels
from benchmarks.placement import placed
from benchmarks.program import ask_in_turn
from benchmarks.records import MIB, ratios, shown, spread, table
from benchmarks.tasks import TASKS, TINY

__all__ = ["KEEP_MEMORY", "MODELS", "draw", "measure", "speed", "speed_published", "speed_targets", "throughput"]

PIPELINES = ("ours", "original")
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")
PEERS = ("plain", "checkpoint_sequential", *PIPELINES, *SCHEDULES)
MODELS = tuple(TASKS["small"])
#: The plain model, one micro-batch after the other: what splitting costs without a pipeline.
SPLIT = "micro-batches"
#: Pipelines with few micro-batches: two, and as many as `checkpoint_sequential` has pieces.
TWO, FEW = "2 micro-batches", "k micro-batches"

#: One heap for all threads, which does not shrink, and nothing beside it: processes keep the memory that they have got
#: from the system, as PyTorch does on GPUs. Otherwise the C library hands large blocks back as soon as they are free,
#: from any thread but the first nearly all, and getting them again, page by page, can take as long as forward itself,
#: for one peer longer than for another. The GNU C library reads this, others do not.
KEEP_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_MAX_": "0"}

PARTITIONS = {"small": (1, 2), "gpu": (1, 4), "paper": (1, 2, 4, 8)}

#: Samples per second of torchgpipe 0.0.3 on Tesla P40, as its documentation has them: by model and experiment.
PUBLISHED = {
    "resnet101": {"naive-1": 92.539, "pipeline-1": 69.960}
    | {"pipeline-2": 137.788, "pipeline-4": 243.322, "pipeline-8": 404.084},
    "amoebanetd": {"naive-2": 14.188, "pipeline-2": 20.346, "pipeline-4": 29.074, "pipeline-8": 34.392},
}


def experiments(peers: list[str], partitions: list[int], modes: list[str]) -> Iterator[tuple[str, int, str, list[str]]]:
    """Yield the name, partitions, checkpoint mode and peers of each experiment."""
    if "plain" in peers:
        yield "naive-1", 1, "-", ["plain"]
        yield SPLIT, 1, "-", ["plain"]
    if "checkpoint_sequential" in peers:
        yield "checkpoint_sequential", 1, "-", ["checkpoint_sequential"]
        if "ours" in peers and 1 in partitions:
            for few in (TWO, FEW):
                yield few, 1, "except_last", ["ours"]
    for n in partitions:
        for mode in modes:
            piped = [peer for peer in peers if peer in PIPELINES or (peer in SCHEDULES and mode == "never" and n > 1)]
            if piped:
                yield f"pipeline-{n}", n, mode, piped


class Proposal(NamedTuple):
    """How a model is to be divided.

    Attributes:
        balances: for each number of partitions that of ours, for all peers, and one of what no skip divides
        segments: for checkpoint_sequential
    """

    balances: dict[int, Request]
    segments: int

    def chunks(self, experiment: str, usual: int) -> int:
        """Return the number of micro-batches."""
        return {TWO: 2, FEW: self.segments}.get(experiment, usual)


def batch_size(args: argparse.Namespace, model: str) -> int:
    """Return the number of samples in a mini-batch."""
    return TASKS[args.size][model].batch * (1 if model in TINY else args.scale)


def proposal(peer: Peer, args: argparse.Namespace, model: str, partitions: list[int]) -> Proposal:
    task = TASKS[args.size][model]
    request: Request = {
        "kind": "balance",
        "size": args.size,
        "model": model,
        "rows": max(1, batch_size(args, model) // task.chunks),
        "device": args.devices[0],
        "partitions": partitions,
        "seconds": {"small": 0.5, "gpu": 3.0, "paper": 10.0}[args.size],
    }
    answer = peer.ask(request)
    return Proposal(dict(zip(partitions, answer["balances"], strict=True)), answer["segments"])


def request_for(
    args: argparse.Namespace, model: str, experiment: str, n: int, mode: str, proposed: Proposal
) -> Request:
    """Return the request to a peer."""
    task = TASKS[args.size][model]
    return {
        "kind": "train",
        "size": args.size,
        "model": model,
        "batch": batch_size(args, model),
        "m": proposed.chunks(experiment, task.chunks),
        "mode": mode,
        **proposed.balances.get(n, {}),
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
    proposals: dict[str, Proposal] = {}
    scripts = {name: "pytorch_pipelines.py" if name in SCHEDULES else "training_steps.py" for name in PEERS}
    with running(dict.fromkeys([*args.peers, "ours"]), scripts, KEEP_MEMORY) as peers:
        for k, model in enumerate(models, 1):
            print(model)
            task = TASKS[args.size][model]
            proposals[model] = proposal(peers["ours"], args, model, partitions)
            cases: list[Case] = [
                {peer: (peer, request_for(args, model, name, n, mode, proposals[model])) for peer in of_experiment}
                for name, n, mode, of_experiment in planned
            ]
            share = k / len(models)
            answers = ask_in_turn(cases, peers, args.turns, lambda share=share: args.seconds.spent(share))  # type: ignore[misc]
            rows += summary(model, batch_size(args, model), task.chunks, proposals[model], planned, answers)
    add_memory(args, rows, proposals)
    published = {"by": "torchgpipe 0.0.3, in its documentation", "on": "Tesla P40", "samples/s": PUBLISHED}
    return {"unit": "samples/s", "published": published, "rows": rows, "targets": targets(rows)}


def add_memory(args: argparse.Namespace, rows: list[dict[str, Any]], proposals: dict[str, Proposal]) -> None:
    """Add the memory of a step to the rows of one device. It is counted after the times, in processes of its own."""
    with running([name for name in args.peers if name not in SCHEDULES], "memory_steps.py") as peers:
        for row in rows:
            for name, peer in peers.items():
                if row["n"] == 1 and "throughput" in row.get(name, {}):
                    request = request_for(
                        args, row["model"], row["experiment"], 1, row["mode"], proposals[row["model"]]
                    )
                    answer = peer.ask({**request, "kind": "footprint"})
                    if "peak" in answer:
                        row[name]["peak"] = answer["peak"][0]


def summary(
    model: str,
    batch: int,
    m: int,
    proposed: Proposal,
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
        own_m = proposed.chunks(name, m)
        row: dict[str, Any] = {"model": model, "experiment": name, "mode": mode, "n": n, "m": own_m, "batch": batch}
        if mode in MODES:
            row["balance"] = proposed.balances[n]["balance"]
            row["ideal"] = ideal_speed_up(n, own_m, mode, forward)
        if mode in ("-", "except_last") and name in PUBLISHED.get(model, {}):
            row["published"] = PUBLISHED[model][name]
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
    "checkpoint_sequential": (1.0, "times the speed of checkpoint_sequential, in equal memory"),
    "original": (1.0, "times the speed of torchgpipe 0.0.7"),
    "host": (1.3, "times the speed of torchgpipe 0.0.7, where the host is the limit"),
}

#: Up to this ratio memory is equal: a thousandth more is an output, or the gradients of some layers.
EQUAL = 1.001


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

        sequential = next((row["checkpoint_sequential"] for row in of_model if "checkpoint_sequential" in row), {})
        if "peak" in sequential:
            frugal = [row for row in ours if row["ours"].get("peak", float("inf")) <= EQUAL * sequential["peak"]]
            frugal_ratios = [(row, ratios(row["ours"]["seconds"], sequential["seconds"])) for row in frugal]
            if frugal_ratios:
                row, best = max(frugal_ratios, key=lambda pair: pair[1]["median"])
                where = f"{row['experiment']}, {row['mode']}"
                reached.append(_target("checkpoint_sequential", model, where, best))

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


# ---- Tables and the picture of a result.


def speed(result: dict[str, Any]) -> str:
    """Return a table of median speed-ups over naive-1."""
    lines = []
    for row in result["rows"]:
        if row["experiment"] == "naive-1":
            continue
        ways = [f"{name} {_speed_up(row[name])}" for name in SCHEDULES if name in row]
        lines.append([row[key] for key in ("model", "experiment", "mode")])
        lines[-1] += [f"{row['ideal']:.2f}" if "ideal" in row else "-"]
        lines[-1] += [_speed_up(row.get(name)) for name in PIPELINES]
        lines[-1] += [_median(row.get("ours", {}).get("over original"))]
        lines[-1] += [", ".join(ways) or _speed_up(row.get("checkpoint_sequential", row.get("plain")))]
    header = ["model", "experiment", "checkpoint", "ideal", *PIPELINES, "ours/original", "PyTorch's own"]
    return table(lines, header)


def _speed_up(answer: dict[str, Any] | None) -> str:
    if not answer:
        return "-"
    return f"- {answer['none']}" if "none" in answer else _median(answer.get("speed-up"))


def _median(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['median']:.2f}"


def throughput(result: dict[str, Any]) -> str:
    """Return a table of what each peer has reached."""
    lines = []
    for row in result["rows"]:
        for peer in (peer for peer in PEERS if peer in row):
            answer = row[peer]
            lines.append([row[key] for key in ("model", "batch", "m", "experiment", "mode")] + [peer])
            lines[-1] += [f"- {answer['none']}" if "none" in answer else shown(answer.get("throughput"))]
            lines[-1] += [shown(answer.get("speed-up"), 2), f"{answer['peak'] / MIB:.1f}" if "peak" in answer else "-"]
    header = ["model", "mini-batch", "m", "experiment", "checkpoint", "peer", "samples/s", "speed-up", "peak, MiB"]
    return table(lines, header)


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


def speed_published(result: dict[str, Any]) -> str:
    lines = []
    for model, figures in result["published"]["samples/s"].items():
        first = next(iter(figures.values()))
        lines += [[model, name, f"{figure:.1f}", f"{figure / first:.2f}"] for name, figure in figures.items()]
    return table(lines, ["model", "experiment", "samples/s", "speed-up"])


def draw(result: dict[str, Any]) -> Any:
    """Draw the speed-up over the number of partitions, a panel for each model but the host-bound ones."""
    drawn: dict[str, list[Curve]] = {}
    for row in result["rows"]:
        if not row["experiment"].startswith("pipeline") or row["model"] in TINY:
            continue
        points = {f"ideal, {row['mode']}": {"median": row["ideal"]}}
        points |= {f"{peer}, {row['mode']}": row[peer]["speed-up"] for peer in PEERS if "speed-up" in row.get(peer, {})}
        for name, figures in points.items():
            curves = drawn.setdefault(row["model"], [])
            curve = next((earlier for earlier in curves if earlier.name == name), None)
            if curve is None:
                curves.append(curve := Curve(name, [], dashed=name.startswith("ideal")))
            curve.points.append((row["n"], figures))
    return panels(drawn, "partitions", "speed-up over the plain model on one device")
