"""Throughput of training: how much faster a model is on n devices, beside what is possible, and beside others.

Experiments are named as torchgpipe's own: `naive-1` is the plain model on one device, the whole mini-batch at once (and
`micro-batches` the same in as many pieces as a pipeline gets, for small pieces take longer), and
`pipeline-n` is a pipeline of n partitions, balanced by time, in each checkpoint mode. PyTorch's `checkpoint_sequential`
is the other way to save memory by recomputation, on one device; it can divide a model only where no skip passes, and
here it makes as many pieces as the root of the number of those places. It keeps the last piece of the model, where a
pipeline with 'except_last' keeps the last micro-batch: what compares with it is a pipeline with few micro-batches, two
(`2 micro-batches`) or as many as the other has pieces (`k micro-batches`). PyTorch's pipelines, `ScheduleGPipe` and
`Schedule1F1B` of torch.distributed.pipelining, take a process for each partition, are cut at the same places, and know
no checkpointing. All train the same model on the same mini-batch.

Speed-up is over `naive-1` in the same turn. The ideal is what the schedule allows, with partitions that take the same
time, and nothing else: of m + n - 1 clocks each device works m, and of a checkpointed micro-batch forward is computed
twice. What share of a step forward is, is measured: of `micro-batches`. (Taken for a third, where those are left out.)

    python -m benchmarks.speed                 # small models, a minute or two on two cores
    python -m benchmarks.speed --size paper    # the real ones, on GPUs
    python -m benchmarks.speed --size gpu      # the same with smaller mini-batches, on one large GPU
    python -m benchmarks.speed --scale 16      # mini-batches, and so micro-batches, of sixteen times the size
    python -m benchmarks.speed --draw          # only draws what was measured: results/speed.svg

Beside the times stands what a step takes in memory on one device (`footprint.py`), and at the end what was aimed at: on
one device a pipeline is to be nearly as fast as recomputation allows; no slower than `checkpoint_sequential` in equal
memory, which is to a thousandth; and no slower than the original, and faster where the host is the limit, which is what
the tiny GPT and the tiny MLP are for: they stay tiny, whatever the scale.

Where there are fewer devices than partitions, neighbours share one, and the ideal is for devices of their own. On a CPU
all partitions share it, and one thread runs them: there it shows what a pipeline costs, not what it gains.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.peers import Answer, Peer, Request
from benchmarks.pictures import COLORS, INK, drawing, open_axes, save
from benchmarks.records import RESULTS, Budget, environment, ratios, shown, spread, table, write
from benchmarks.training import TASKS, TINY

PIPELINES = ("ours", "original")
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")
PEERS = ("plain", "checkpoint_sequential", *PIPELINES, *SCHEDULES)
MODES = ("always", "except_last", "never")
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

#: What is aimed at, as ratios of speeds: to the limit on one device, to checkpoint_sequential in equal memory, and to
#: the original, in general and where the host is the limit.
AIMS = {"limit": 0.9, "split": 0.9, "checkpoint_sequential": 1.0, "original": 1.0, "host": 1.3}

#: Up to this ratio memory is equal: a thousandth more is an output, or the gradients of some layers.
EQUAL = 1.001

#: Samples per second of torchgpipe 0.0.3 on Tesla P40, as its documentation has them: by model and experiment.
PUBLISHED = {
    "resnet101": {
        "naive-1": 92.539,
        "pipeline-1": 69.960,
        "pipeline-2": 137.788,
        "pipeline-4": 243.322,
        "pipeline-8": 404.084,
    },
    "amoebanetd": {"naive-2": 14.188, "pipeline-2": 20.346, "pipeline-4": 29.074, "pipeline-8": 34.392},
}


def ideal(n: int, m: int, mode: str, forward: float = 1 / 3) -> float:
    """The largest possible speed-up over one device that recomputes nothing.

    Args:
        forward: the share of a step
    """
    again = {"always": m, "except_last": m - 1, "never": 0}[mode]
    return n * m / (m + n - 1) * m / (m + again * forward)


def placed(devices: list[str], n: int) -> list[str]:
    """The device of each partition."""
    count = min(n, len(devices))
    return [devices[j * count // n] for j in range(n)]


def experiments(peers: list[str], partitions: list[int], modes: list[str]) -> Iterator[tuple[str, int, str, list[str]]]:
    """Name, partitions, checkpoint mode, and who takes part."""
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


def script(peer: str) -> str:
    """What a peer's process runs."""
    return "stages.py" if peer in SCHEDULES else "training.py"


class Proposal(NamedTuple):
    """How a model is to be divided.

    Attributes:
        balances: for each number of partitions that of ours, for all peers, and one of what no skip divides
        segments: for checkpoint_sequential
    """

    balances: dict[int, Request]
    segments: int

    def chunks(self, experiment: str, usual: int) -> int:
        """The number of micro-batches."""
        return {TWO: 2, FEW: self.segments}.get(experiment, usual)


def batch_size(args: argparse.Namespace, model: str) -> int:
    """The samples of a mini-batch."""
    return TASKS[args.size][model].batch * (1 if model in TINY else args.scale)


def proposal(peer: Peer, args: argparse.Namespace, model: str) -> Proposal:
    task = TASKS[args.size][model]
    request: Request = {
        "kind": "balance",
        "size": args.size,
        "model": model,
        "rows": max(1, batch_size(args, model) // task.chunks),
        "device": args.devices[0],
        "partitions": args.partitions,
        "seconds": {"small": 0.5, "gpu": 3.0, "paper": 10.0}[args.size],
    }
    answer = peer.ask(request)
    return Proposal(dict(zip(args.partitions, answer["balances"], strict=True)), answer["segments"])


def request_for(
    args: argparse.Namespace, model: str, experiment: str, peer: str, n: int, mode: str, found: Proposal
) -> Request:
    """What a peer is asked to do."""
    task = TASKS[args.size][model]
    return {
        "kind": "train",
        "size": args.size,
        "model": model,
        "batch": batch_size(args, model),
        "m": found.chunks(experiment, task.chunks),
        "mode": mode,
        **found.balances.get(n, {}),
        "split": experiment == SPLIT,
        "devices": placed(args.devices, n),
        "warm_up": 1 if args.size == "small" else 2,
        "steps": args.steps,
    }


def measure(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """One row for each experiment on each model: each peer's throughput, turn by turn. Yields the rows so far."""
    planned = list(experiments(args.peers, args.partitions, args.checkpoint))
    rows: list[dict[str, Any]] = []
    found: dict[str, Proposal] = {}
    total = len(args.models) * args.turns * sum(len(peers) for *_, peers in planned)
    with ExitStack() as stack:
        running = {name: stack.enter_context(Peer(name, script(name), KEEP_MEMORY)) for name in args.peers}
        proposing = running.get("ours") or stack.enter_context(Peer("ours", "training.py"))
        bar = stack.enter_context(tqdm(total=total, unit="run"))
        for k, model in enumerate(args.models, 1):
            task = TASKS[args.size][model]
            bar.set_description(f"{model}: balancing")
            found[model] = proposal(proposing, args, model)
            answers: list[dict[str, list[Answer]]] = [{peer: [] for peer in peers} for *_, peers in planned]
            for turn in range(args.turns):
                if turn and args.seconds.spent(k / len(args.models)):
                    break
                for (name, n, mode, peers), answered in zip(planned, answers, strict=True):
                    bar.set_description(f"{model}: {name} {mode}")
                    for peer in peers:
                        request = request_for(args, model, name, peer, n, mode, found[model])
                        answered[peer].append(running[peer].ask(request))
                        bar.update()
            rows += summary(model, batch_size(args, model), task.chunks, found[model], planned, answers)
            yield rows
    add_memory(args, rows, found)
    yield rows


def add_memory(args: argparse.Namespace, rows: list[dict[str, Any]], found: dict[str, Proposal]) -> None:
    """Tells the rows of one device what a step takes. Counted after the times, in processes of its own."""
    alone = [row for row in rows if row["n"] == 1]
    for name in args.peers:
        if name in SCHEDULES:
            continue
        with Peer(name, "footprint.py") as peer:
            for row in alone:
                if "throughput" in row.get(name, {}):
                    model = row["model"]
                    what = model, row["experiment"], name
                    answer = peer.ask(request_for(args, *what, 1, row["mode"], found[model]))
                    if "peak" in answer:
                        row[name]["peak"] = answer["peak"][0]


def summary(
    model: str,
    batch: int,
    m: int,
    found: Proposal,
    planned: list[tuple[str, int, str, list[str]]],
    answers: list[dict[str, list[Answer]]],
) -> list[dict[str, Any]]:
    """The rows of one model."""
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
        own_m = found.chunks(name, m)
        row: dict[str, Any] = {"model": model, "experiment": name, "mode": mode, "n": n, "m": own_m, "batch": batch}
        if mode in MODES:
            row["balance"] = found.balances[n]["balance"]
            row["ideal"] = ideal(n, own_m, mode, forward)
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
    """The share of forward in a step of the plain model."""
    shares = [part / whole for turn in turns for part, whole in zip(turn.get("forward", ()), turn.get("seconds", ()))]
    return statistics.median(shares) if shares else 1 / 3


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was aimed at, and what was reached: medians of ratios, turn by turn."""
    reached = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        ours = [row for row in own if "throughput" in row.get("ours", {})]
        alone = [row for row in ours if row["experiment"] == "pipeline-1"]

        split = next((row["plain"] for row in own if row["experiment"] == SPLIT), {})
        for row in alone:
            if "speed-up" in row["ours"]:
                share = {key: value / row["ideal"] for key, value in row["ours"]["speed-up"].items()}
                reached.append(_reached("limit", model, f"pipeline-1, {row['mode']}", share))
            if "seconds" in split:
                over = ratios(row["ours"]["seconds"], split["seconds"])
                share = {key: value / row["ideal"] for key, value in over.items()}
                reached.append(_reached("split", model, f"pipeline-1, {row['mode']}", share))

        other = next((row["checkpoint_sequential"] for row in own if "checkpoint_sequential" in row), {})
        if "peak" in other:
            frugal = [row for row in ours if row["ours"].get("peak", float("inf")) <= EQUAL * other["peak"]]
            found = [(row, ratios(row["ours"]["seconds"], other["seconds"])) for row in frugal]
            if found:
                row, best = max(found, key=lambda one: one[1]["median"])
                where = f"{row['experiment']}, {row['mode']}"
                reached.append(_reached("checkpoint_sequential", model, where, best))

        aim = "host" if model in TINY else "original"
        for row in ours:
            if "over original" in row["ours"]:
                where = f"{row['experiment']}, {row['mode']}"
                reached.append(_reached(aim, model, where, row["ours"]["over original"]))
    return reached


def _reached(aim: str, model: str, where: str, figures: dict[str, float]) -> dict[str, Any]:
    met = figures["median"] >= AIMS[aim]
    return {"aim": aim, "at least": AIMS[aim], "model": model, "where": where, "reached": figures, "met": met}


WORDS = {
    "limit": "of what recomputation allows on one device",
    "split": "of the same, the plain model being given micro-batches as well",
    "checkpoint_sequential": "times the speed of checkpoint_sequential, in equal memory",
    "original": "times the speed of torchgpipe 0.0.7",
    "host": "times the speed of torchgpipe 0.0.7, where the host is the limit",
}


def targets_table(reached: list[dict[str, Any]]) -> str:
    """For each aim and model how often it was met, and the best and the worst."""
    lines = []
    for aim, words in WORDS.items():
        for model in dict.fromkeys(one["model"] for one in reached):
            own = [one for one in reached if (one["aim"], one["model"]) == (aim, model)]
            if own:
                own.sort(key=lambda one: one["reached"]["median"])
                ends = [f"{shown(one['reached'], 2)}, {one['where']}" for one in (own[0], own[-1])]
                met = f"{sum(one['met'] for one in own)} of {len(own)}"
                lines.append([f"{AIMS[aim]} {words}", model, met, *ends])
    return table(lines, ["aim, at least", "model", "met", "lowest", "highest"])


def speed_table(rows: list[dict[str, Any]]) -> str:
    """The rows of one model."""
    header = ["experiment", "checkpoint", "peer", "samples/s", "speed-up", "ideal", "over original", "peak, MiB"]
    lines = []
    for row in rows:
        for peer in (peer for peer in PEERS if peer in row):
            of = row[peer]
            lines.append(
                [
                    row["experiment"],
                    row["mode"],
                    peer,
                    shown(of.get("throughput"), 1) if "none" not in of else f"- {of['none']}",
                    shown(of.get("speed-up"), 2),
                    f"{row['ideal']:.2f}" if "ideal" in row else "-",
                    shown(of.get("over original"), 2),
                    f"{of['peak'] / 2**20:.1f}" if "peak" in of else "-",
                ]
            )
    return table(lines, header)


def published_table(published: dict[str, dict[str, float]]) -> str:
    lines = []
    for model, figures in published.items():
        first = next(iter(figures.values()))
        lines += [[model, name, f"{figure:.1f}", f"{figure / first:.2f}"] for name, figure in figures.items()]
    return table(lines, ["model", "experiment", "samples/s", "speed-up"])


def by_model(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """What is to be said about each model, and its rows."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        yield f"{model}: mini-batches of {own[0]['batch']} in {own[0]['m']} micro-batches", own


def show(result: dict[str, Any]) -> None:
    for about, own in by_model(result["rows"]):
        print(f"\n{about}; median of turns (lowest-highest)\n\n" + speed_table(own))
    if result["targets"]:
        print("\nwhat was aimed at\n\n" + targets_table(result["targets"]))
    print("\ntorchgpipe 0.0.3's own figures, of models of full size on Tesla P40\n\n" + published_table(PUBLISHED))


@drawing
def draw(result: dict[str, Any], path: Path) -> None:
    """Speed-up over the number of partitions, a panel for each model but the host-bound ones."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["experiment"].startswith("pipeline") and row["model"] not in TINY]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        print("\nno pipeline was measured: nothing to draw")
        return
    columns = min(4, len(models))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(3.6 * columns + 2.2, 3.5 * lines + 0.4), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, model in zip(panels, models):
        own = [row for row in rows if row["model"] == model]
        draw_model(axes, own)
        partitions = sorted({row["n"] for row in own})
        open_axes(axes, title=model, xlabel="partitions", xticks=partitions, ylim=(0, None))
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    figure.supylabel("speed-up over the plain model on one device", fontsize=10)
    labels = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels())}
    figure.legend(labels.values(), labels.keys(), loc="outside right upper", frameon=False)
    save(figure, path)


def draw_model(axes: Any, rows: list[dict[str, Any]]) -> None:
    for mode, color in zip(MODES, COLORS):
        of_mode = [row for row in rows if row["mode"] == mode]
        if of_mode:
            ideals = [row["ideal"] for row in of_mode]
            partitions = [row["n"] for row in of_mode]
            axes.plot(partitions, ideals, color=color, linewidth=1, linestyle=":", label=f"ideal, {mode}")
        for peer, style in zip(PIPELINES, ("-", "--"), strict=True):
            draw_line(axes, of_mode, peer, color=color, linestyle=style, label=f"{peer}, {mode}")
    for peer, color, style in zip(SCHEDULES, COLORS[3:], ("-", "--")):
        draw_line(axes, rows, peer, color=color, linestyle=style, label=f"{peer}, never")
    published = PUBLISHED.get(rows[0]["model"], {})
    first = published.get("naive-1")
    points = [] if first is None else [(row["n"], row["published"] / first) for row in rows if "published" in row]
    if points:
        axes.plot(*zip(*points, strict=True), "x", color=INK, label="published, on Tesla P40")


def draw_line(axes: Any, rows: Sequence[dict[str, Any]], peer: str, **style: Any) -> None:
    known = [(row["n"], row[peer]["speed-up"]) for row in rows if "speed-up" in row.get(peer, {})]
    if known:
        error = [[abs(figures["median"] - figures[end]) for _, figures in known] for end in ("low", "high")]
        partitions, middle = [n for n, _ in known], [figures["median"] for _, figures in known]
        axes.errorbar(partitions, middle, error, marker="o", markersize=4, capsize=3, **style)


def main() -> None:
    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=list(TASKS), default="small")
    parser.add_argument("--models", nargs="+", choices=list(TASKS["small"]), default=list(TASKS["small"]))
    parser.add_argument("--devices", nargs="+", default=found or ["cpu"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--partitions", nargs="+", type=int, help="n")
    parser.add_argument("--checkpoint", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--scale", type=int, default=1, help="how many times the usual mini-batch")
    parser.add_argument("--turns", type=int, default=None, help="of each peer at each experiment")
    parser.add_argument("--steps", type=int, default=None, help="in a turn, whose figure is their median")
    parser.add_argument("--seconds", type=Budget, default=Budget(), help="start no further turn after so many")
    parser.add_argument("--json", type=Path, default=RESULTS / "speed.json")
    parser.add_argument("--draw", action="store_true", help="only draw the JSON that is there")
    args = parser.parse_args()
    args.partitions = args.partitions or list(PARTITIONS[args.size])
    args.turns = args.turns or {"small": 3, "gpu": 3, "paper": 5}[args.size]
    args.steps = args.steps or {"small": 1, "gpu": 3, "paper": 5}[args.size]

    if args.draw:
        draw(json.loads(args.json.read_text()), args.json.with_suffix(".svg"))
        return
    before = environment()
    published = {"by": "torchgpipe 0.0.3, in its documentation", "on": "Tesla P40", "samples/s": PUBLISHED}
    about = {"size": args.size, "scale": args.scale, "devices": args.devices, "turns": args.turns, "steps": args.steps}
    result: dict[str, Any] = {"unit": "samples/s", "environment": before, **about, "published": published}
    # After each model: what was measured of the first is there, whatever becomes of the last.
    for rows in measure(args):
        result |= {"rows": rows, "targets": targets(rows)}
        write(args.json, result)
    show(result)
    draw(result, args.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
