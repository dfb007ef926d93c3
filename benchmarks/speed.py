"""Throughput of training: how much faster a model is on n devices, beside what is possible, and beside others.

Experiments are named as torchgpipe's own: `naive-1` is the plain model on one device, the whole mini-batch at once, and
`pipeline-n` is a pipeline of n partitions, balanced by time, in each checkpoint mode. PyTorch's `checkpoint_sequential`
is the other way to save memory by recomputation, on one device; it can divide a model only where no skip passes, and
here it makes as many pieces as the root of the number of those places. All train the same model on the same mini-batch.

Speed-up is over `naive-1` in the same turn. The ideal is what the schedule allows, with partitions that take the same
time, a backward of twice the time of forward, and nothing else: of m + n - 1 clocks each device works m, and a
checkpointed micro-batch is computed four thirds as long.

    python -m benchmarks.speed                 # small models, a minute or two on two cores
    python -m benchmarks.speed --size paper    # the real ones, on GPUs
    python -m benchmarks.speed --draw          # only draws what was measured: results/speed.svg

Where there are fewer devices than partitions, neighbours share one. On CPUs each partition of ours has a thread, but
backward runs in one thread, as PyTorch does it: the ideal is for devices of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.peers import Answer, Peer, Request
from benchmarks.records import RESULTS, environment, ratios, spread, table, write
from benchmarks.training import TASKS

PIPELINES = ("ours", "original")
PEERS = ("plain", "checkpoint_sequential", *PIPELINES)
MODES = ("always", "except_last", "never")
PARTITIONS = (1, 2, 4, 8)

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


def ideal(n: int, m: int, mode: str) -> float:
    """The largest possible speed-up over one device that recomputes nothing."""
    again = {"always": m, "except_last": m - 1, "never": 0}[mode]
    return n * m / (m + n - 1) * 3 * m / (3 * m + again)


def placed(peer: str, devices: list[str], n: int) -> list[str]:
    """The device of each partition. Ours takes numbered CPUs as devices of their own, each with a worker."""
    if devices == ["cpu"] and peer == "ours":
        return [f"cpu:{j}" for j in range(n)]
    count = min(n, len(devices))
    return [devices[j * count // n] for j in range(n)]


def experiments(peers: list[str], partitions: list[int], modes: list[str]) -> Iterator[tuple[str, int, str, list[str]]]:
    """Name, partitions, checkpoint mode, and who takes part."""
    if "plain" in peers:
        yield "naive-1", 1, "-", ["plain"]
    if "checkpoint_sequential" in peers:
        yield "checkpoint_sequential", 1, "-", ["checkpoint_sequential"]
    piped = [peer for peer in peers if peer in PIPELINES]
    if piped:
        for n in partitions:
            for mode in modes:
                yield f"pipeline-{n}", n, mode, piped


def balances(size: str, model: str, devices: list[str], partitions: list[int], seconds: float) -> dict[int, list[int]]:
    """The balance for each number of partitions, proposed by ours for all peers."""
    task = TASKS[size][model]
    request: Request = {
        "kind": "balance",
        "size": size,
        "model": model,
        "rows": max(1, task.batch // task.chunks),
        "device": devices[0],
        "partitions": partitions,
        "seconds": seconds,
    }
    with Peer("ours", "training.py") as peer:
        return dict(zip(partitions, peer.ask(request)["balances"], strict=True))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each experiment on each model: each peer's throughput, turn by turn."""
    paper = args.size == "paper"
    planned = list(experiments(args.peers, args.partitions, args.checkpoint))
    rows = []
    total = len(args.models) * args.turns * sum(len(peers) for *_, peers in planned)
    with ExitStack() as stack:
        running = {name: stack.enter_context(Peer(name, "training.py")) for name in args.peers}
        bar = stack.enter_context(tqdm(total=total, unit="run"))
        for model in args.models:
            task = TASKS[args.size][model]
            bar.set_description(f"{model}: balancing")
            found = balances(args.size, model, args.devices, args.partitions, 10.0 if paper else 1.0)
            answers: list[dict[str, list[Answer]]] = [{peer: [] for peer in peers} for *_, peers in planned]
            for _ in range(args.turns):
                for (name, n, mode, peers), answered in zip(planned, answers, strict=True):
                    bar.set_description(f"{model}: {name} {mode}")
                    for peer in peers:
                        request = {
                            "kind": "train",
                            "size": args.size,
                            "model": model,
                            "batch": task.batch,
                            "m": task.chunks,
                            "mode": mode,
                            "balance": found.get(n),
                            "devices": placed(peer, args.devices, n),
                            "warm_up": 2 if paper else 1,
                            "steps": args.steps,
                        }
                        answered[peer].append(running[peer].ask(request))
                        bar.update()
            rows += summary(model, task.batch, task.chunks, found, planned, answers)
    return rows


def summary(
    model: str,
    batch: int,
    m: int,
    found: dict[int, list[int]],
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

    rows = []
    for (name, n, mode, peers), of_peers, answered in zip(planned, seconds, answers, strict=True):
        row: dict[str, Any] = {"model": model, "experiment": name, "mode": mode, "n": n, "m": m, "batch": batch}
        if name.startswith("pipeline"):
            row["balance"] = found[n]
            row["ideal"] = ideal(n, m, mode)
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


def shown(figures: dict[str, float] | None, digits: int) -> str:
    if figures is None:
        return "-"
    return f"{figures['median']:.{digits}f} ({figures['low']:.{digits}f}-{figures['high']:.{digits}f})"


def show(rows: list[dict[str, Any]]) -> None:
    header = ["experiment", "checkpoint", "peer", "samples/s", "speed-up", "ideal", "over original", "theirs, P40"]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines = []
        own = [row for row in rows if row["model"] == model]
        for row in own:
            theirs = row.get("published")  # told once, beside the first peer
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
                        "-" if theirs is None else f"{theirs:.1f}",
                    ]
                )
                theirs = None
        about = f"mini-batches of {own[0]['batch']} in {own[0]['m']} micro-batches"
        print(f"\n{model}: {about}; median of turns (lowest-highest)\n\n" + table(lines, header))
    print(
        "\n'theirs, P40': samples/s that torchgpipe published for its own benchmark, of the large models on Tesla P40."
        "\nOnly how they grow from one experiment to the next can be compared with the other figures."
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed-up over the number of partitions, a panel for each model."""
    import matplotlib
    from matplotlib.figure import Figure

    ink, colors = "#404040", dict(zip(MODES, ("#e07a1f", "#1f6f8b", "#8a5fbf"), strict=True))
    matplotlib.rcParams.update({"font.size": 10, "axes.titlesize": 11, "text.color": ink, "svg.hashsalt": "speed"})
    rows = [row for row in result["rows"] if row["experiment"].startswith("pipeline")]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        print("\nno pipeline was measured: nothing to draw")
        return
    figure = Figure(figsize=(3.6 * len(models) + 1.5, 4.2), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        for mode, color in colors.items():
            of_mode = [row for row in own if row["mode"] == mode]
            if not of_mode:
                continue
            axes.plot(
                [row["n"] for row in of_mode],
                [row["ideal"] for row in of_mode],
                color=color,
                linewidth=1,
                linestyle=":",
                label=f"ideal, {mode}",
            )
            for peer, style in zip(PIPELINES, ("-", "--"), strict=True):
                known = [(row["n"], row[peer]["speed-up"]) for row in of_mode if "speed-up" in row.get(peer, {})]
                if known:
                    middle = [figures["median"] for _, figures in known]
                    error = [[abs(figures["median"] - figures[end]) for _, figures in known] for end in ("low", "high")]
                    axes.errorbar(
                        [n for n, _ in known],
                        middle,
                        error,
                        color=color,
                        linestyle=style,
                        marker="o",
                        markersize=4,
                        capsize=3,
                        label=f"{peer}, {mode}",
                    )
        published = PUBLISHED.get(model, {})
        if "naive-1" in published:
            points = [(row["n"], row["published"] / published["naive-1"]) for row in own if "published" in row]
            if points:
                axes.plot(*zip(*points, strict=True), "x", color=ink, label="torchgpipe's own, Tesla P40")
        axes.set_title(model, loc="left")
        axes.set(xlabel="partitions", xticks=sorted({row["n"] for row in own}), ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=ink)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("speed-up over the plain model on one device")
    labels = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels())}
    figure.legend(labels.values(), labels.keys(), loc="outside right upper", frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"\ndrawn: {path.name}")


def main() -> None:
    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=list(TASKS), default="small")
    parser.add_argument("--models", nargs="+", choices=list(TASKS["small"]), default=list(TASKS["small"]))
    parser.add_argument("--devices", nargs="+", default=found or ["cpu"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--partitions", nargs="+", type=int, default=list(PARTITIONS), help="n")
    parser.add_argument("--checkpoint", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--turns", type=int, default=None, help="of each peer at each experiment")
    parser.add_argument("--steps", type=int, default=None, help="in a turn, whose figure is their median")
    parser.add_argument("--json", type=Path, default=RESULTS / "speed.json")
    parser.add_argument("--draw", action="store_true", help="only draw the JSON that is there")
    args = parser.parse_args()
    args.turns = args.turns or (5 if args.size == "paper" else 3)
    args.steps = args.steps or (5 if args.size == "paper" else 1)

    if args.draw:
        draw(json.loads(args.json.read_text()), args.json.with_suffix(".svg"))
        return
    before = environment()
    rows = measure(args)
    show(rows)
    published = {"by": "torchgpipe 0.0.3, in its documentation", "on": "Tesla P40", "samples/s": PUBLISHED}
    about = {"size": args.size, "devices": args.devices, "turns": args.turns, "steps": args.steps}
    result = {"unit": "samples/s", "environment": before, **about, "published": published, "rows": rows}
    write(args.json, result)
    draw(result, args.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
