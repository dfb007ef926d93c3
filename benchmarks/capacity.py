"""Capacity: the largest model that can be trained on so many devices, and what the peak of a step depends on.

Two questions, both about the memory of a training step (`footprint.py` says what is counted):

1. How large can a model be? Experiments are named as torchgpipe's own: `naive-1` is the plain model, `pipeline-n` a
   pipeline of n partitions, balanced by size, with all micro-batches checkpointed. Each climbs a ladder of ever larger
   models until one does not fit. On GPUs a model fits if it can be trained, on the CPU if its peak is within `--limit`
   a partition, all of them together, because they share one memory.
2. What does the peak depend on? The same model and mini-batch, in more micro-batches and over more partitions.

`memory.py` asks another question: what every byte is for, beside the original, with micro-batches of constant size.

    python -m benchmarks.capacity                              # small models, on the CPU
    python -m benchmarks.capacity --size paper                 # AmoebaNet-D and U-Net, on GPUs
    python -m benchmarks.capacity --size paper --limit 22.4    # the same with as many GiB as a Tesla P40 has
    python -m benchmarks.capacity --draw                       # only draws what was measured: results/capacity.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.cost import MODES
from benchmarks.peers import Answer, Peer, Request, running
from benchmarks.pictures import COLORS, new_figure, open_axes, shared_legend
from benchmarks.placement import even, placed
from benchmarks.program import Command, Progress
from benchmarks.records import GIB, MIB, table
from benchmarks.speed import PIPELINES
from benchmarks.training import TASKS

PEERS = ("plain", *PIPELINES)
QUESTIONS = ("largest", "growth")


class Ladder(NamedTuple):
    """A kind of model that grows.

    Attributes:
        first: arguments of all its sizes, before those of the size
        sizes: from small to large
        sample: the shape of an image
        batch: the size of a mini-batch
        chunks: the micro-batches that a pipeline splits it into
    """

    first: tuple[int, ...]
    sizes: Sequence[tuple[int, int]]
    sample: tuple[int, ...]
    batch: int
    chunks: int

    def arguments(self, size: tuple[int, int]) -> list[int]:
        return [*self.first, *size]


#: Sizes are (L, D) of an AmoebaNet-D, and (B, C) of a U-Net. The paper's are among the large ones.
LARGE_AMOEBANETS = [
    (18, 208),
    (18, 416),
    (18, 544),
    (36, 544),
    (72, 512),
    (72, 768),
    (72, 1024),
    (144, 1024),
    (144, 1536),
]
LARGE_UNETS = [(6, 72), (11, 128), (24, 128), (24, 160), (48, 160), (48, 224), (96, 224)]
LADDERS: dict[str, dict[str, Ladder]] = {
    "small": {
        "amoebanetd": Ladder((10,), [(3, 8), (3, 16), (3, 24), (3, 32), (3, 40), (3, 48)], (3, 16, 16), 8, 4),
        "unet": Ladder((2,), [(1, 8), (2, 8), (2, 16), (2, 24), (3, 32), (3, 48)], (3, 32, 32), 8, 4),
    },
    "paper": {
        "amoebanetd": Ladder((1000,), LARGE_AMOEBANETS, (3, 224, 224), 128, 32),
        "unet": Ladder((5,), LARGE_UNETS, (3, 192, 192), 32, 32),
    },
}
LADDERS["gpu"] = LADDERS["paper"]  # On one large GPU it is climbed less far.

#: What torchgpipe 0.0.3 gives in its documentation, on Tesla P40: millions of parameters, GB for the model (parameters,
#: gradients, optimizer), and GB for the activations at the peak, over all devices.
PUBLISHED = {
    "amoebanetd": {
        "naive-1": [90, 1.00, None],
        "pipeline-1": [358, 4.01, 6.64],
        "pipeline-2": [613, 6.45, 11.31],
        "pipeline-4": [1160, 13.00, 18.72],
        "pipeline-8": [2010, 22.42, 35.78],
    }
}


def fits(answer: Answer, limit: float | None, n: int) -> bool:
    """Return whether a model could be trained, within the limit in bytes a partition if there is one."""
    return "peak" in answer and (limit is None or sum(answer["peak"]) <= limit * n)


def request_for(model: str, ladder: Ladder, size: tuple[int, int]) -> Request:
    about = {"model": model, "args": ladder.arguments(size), "sample": ladder.sample}
    return {**about, "batch": ladder.batch, "m": ladder.chunks, "mode": "always"}


class Balances:
    """Balances by size, the same for all peers, found when they are needed for the first time."""

    def __init__(self, peer: Peer, partitions: list[int]) -> None:
        self._peer = peer
        self._partitions = partitions
        self._known: dict[str, list[list[int]]] = {}

    def of(self, request: Request, n: int) -> list[int]:
        key = json.dumps(request)
        if key not in self._known:
            self._known[key] = self._peer.ask({**request, "partitions": self._partitions})["balances"]
        return self._known[key][self._partitions.index(n)]


def climb(
    peer: Peer, name: str, n: int, model: str, start: int, balances: Balances, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for each size, up to the first that does not fit."""
    on_cpu = args.devices == ["cpu"]
    ladder = LADDERS[args.size][model]
    for size in ladder.sizes[start:]:
        request = request_for(model, ladder, size)
        asked = {**request, "devices": placed(args.devices, n), "limit": None if on_cpu else args.limit}
        if peer.name != "plain":
            asked["balance"] = balances.of(request, n)
        answer = peer.ask(asked)
        row = {"model": model, "experiment": name, "peer": peer.name, "n": n, "size": list(size), **answer}
        row["fits"] = fits(answer, args.limit if on_cpu else None, n)
        yield row
        if not row["fits"]:
            return


def largest(args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """Answer question 1 with a row for each size that was tried."""
    rows: list[dict[str, Any]] = []
    with Peer("ours", "footprint.py") as asked:
        balances = Balances(asked, args.partitions)
        for model in args.models:
            for name in args.peers:
                start = 0
                for n in [1] if name == "plain" else args.partitions:
                    if args.seconds.spent():
                        return rows
                    experiment = f"{'naive' if name == 'plain' else 'pipeline'}-{n}"
                    progress(f"{model}: {experiment} {name}")
                    # In a process of its own, which gives all memory back when it ends, also after memory has run out.
                    with Peer(name, "footprint.py") as peer:
                        tried = list(climb(peer, experiment, n, model, start, balances, args))
                    # On more devices at least the same fits: the ladder need not be climbed from the ground again.
                    start += max(0, sum(row["fits"] for row in tried) - 1)
                    rows += tried
    return rows


def sweep(args: argparse.Namespace) -> Iterator[tuple[str, int, int, str]]:
    """Yield the varied number, 'm' or 'n', and micro-batches, partitions and mode."""
    most = max(args.partitions)
    for mode in MODES:
        yield from (("m", m, most, mode) for m in args.chunks)
        yield from (("n", max(args.chunks), n, mode) for n in args.partitions)


def growth(args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """Answer question 2 with a row for each number of micro-batches or partitions."""
    task = TASKS[args.size]["resnet101"]
    with torch.device("meta"):
        layers = len(task.make())
    rows = []
    with running(args.peers, "footprint.py") as peers:
        for axis, m, n, mode in sweep(args):
            if args.seconds.spent():
                break
            progress(f"resnet101: {m} micro-batches, {n} partitions, {mode}")
            row: dict[str, Any] = {"axis": axis, "m": m, "n": n, "mode": mode, "batch": task.batch}
            shape = {"size": args.size, "model": "resnet101", "batch": task.batch, "m": m, "mode": mode}
            for name, peer in peers.items():
                if name == "plain" and rows:
                    row[name] = rows[0][name]  # The plain model knows neither micro-batches nor partitions.
                    continue
                devices = placed(args.devices, 1 if name == "plain" else n)
                row[name] = peer.ask({**shape, "balance": even(layers, n), "devices": devices})
            rows.append(row)
    return rows


# ---- Tables and the picture of a result.


def capacity(result: dict[str, Any]) -> str:
    """Return a table of the largest model that fits, for each experiment."""
    name, unit = ("MiB", MIB) if result["size"] == "small" else ("GiB", GIB)
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in result["largest"]:
        key = row["model"], row["experiment"], row["peer"]
        if row["fits"] or key not in found:
            found[key] = row
    lines: list[list[str]] = []
    for (model, experiment, peer), row in found.items():
        lines.append([model, experiment, peer, *["none", "-", "-", "-", "-"]])
        if row["fits"]:
            sums = (f"{sum(row[part]) / unit:.2f}" for part in ("kept", "activations"))
            each = ", ".join(f"{one / unit:.2f}" for one in row["peak"])
            lines[-1][3:] = ["({}, {})".format(*row["size"]), f"{row['parameters'] / 1e6:.2f}", *sums, each]
        theirs = PUBLISHED.get(model, {}).get(experiment, []) if peer in ("ours", "plain") else []
        lines[-1].append(" / ".join("-" if one is None else f"{one:g}" for one in theirs) or "-")
    header = ["model", "experiment", "peer", "largest", "parameters, M", f"model, {name}", f"activations, {name}"]
    return table(lines, [*header, f"peak of each memory, {name}", "theirs, P40"])


def capacity_growth(result: dict[str, Any]) -> str:
    rows = result["growth"]
    peers = [name for name in ("ours", "original", "plain") if name in rows[0]]
    lines = [
        [row["m"], row["n"], row["mode"], *(peak_of(row[name]) for name in peers)]
        for row in rows
        if row["axis"] == "m" or row["n"] != max(one["n"] for one in rows)
    ]
    return table(lines, ["micro-batches", "partitions", "checkpoint", *(f"{name}, MiB" for name in peers)])


def peak_of(answer: Answer) -> str:
    """Return the activations at the peak of the fullest device, in MiB."""
    return f"{max(answer['activations']) / MIB:.2f}" if "peak" in answer else f"- {answer['none']}"


def show(result: dict[str, Any]) -> dict[str, str]:
    told = {}
    if result["largest"]:
        told["the largest model that fits"] = capacity(result)
    if result["devices"] == ["cpu"]:
        limit = f"a model fits if its peak is within {result['limit']:g} MiB a partition, all together."
        told[f"The CPU has one memory for all partitions: {limit}"] = ""
    if result["growth"]:
        batch = result["growth"][0]["batch"]
        told[f"resnet101, mini-batches of {batch}: activations at the peak"] = capacity_growth(result)
    return told


def draw(result: dict[str, Any]) -> Any:
    """Draw the largest models, and the peak over micro-batches and over partitions."""
    if not (result["largest"] and result["growth"]):
        return None
    figure = new_figure(13, 4.2)
    left, middle, right = figure.subplots(1, 3)
    draw_largest(left, result)
    for axes, axis, what in ((middle, "m", "micro-batches"), (right, "n", "partitions")):
        draw_growth(axes, [row for row in result["growth"] if row["axis"] == axis], axis, what)
    shared_legend(figure, [middle])
    return figure


def draw_largest(axes: Any, result: dict[str, Any]) -> None:
    best: dict[tuple[str, str], dict[str, float]] = {}
    for row in result["largest"]:
        if row["fits"] and row["peer"] != "original":
            best.setdefault((row["model"], row["peer"]), {})[row["experiment"]] = row["parameters"] / 1e6
    names = list(dict.fromkeys(name for found in best.values() for name in found))
    models = list(dict.fromkeys(model for model, _ in best))
    width = 0.8 / max(1, len(models))
    for k, model in enumerate(models):
        found = {name: value for (of, _), values in best.items() if of == model for name, value in values.items()}
        places = [names.index(name) + (k - (len(models) - 1) / 2) * width for name in found]
        bars = axes.bar(places, list(found.values()), width, color=COLORS[k], label=model)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    open_axes(axes, title="largest model that fits", ylabel="million parameters", xticks=range(len(names)))
    axes.set_xticklabels(names, rotation=20)
    if models:
        axes.legend(frameon=False, loc="upper left")


def draw_growth(axes: Any, rows: list[dict[str, Any]], axis: str, what: str) -> None:
    for mode, color in zip(MODES, COLORS):
        for peer, style in zip(PIPELINES, ("-", "--"), strict=True):
            known = [row for row in rows if row["mode"] == mode and "peak" in row.get(peer, {})]
            if known:
                peaks = [max(row[peer]["activations"]) / MIB for row in known]
                along = [row[axis] for row in known]
                axes.plot(along, peaks, style, color=color, marker="o", markersize=4, label=f"{peer}, {mode}")
    if rows and "peak" in rows[0].get("plain", {}):
        axes.axhline(max(rows[0]["plain"]["activations"]) / MIB, color=COLORS[-1], linewidth=1, label="plain")
    other = "n" if axis == "m" else "m"
    others = {"n": "partitions", "m": "micro-batches"}[other]
    fixed = f", {rows[0][other]} {others}" if rows else ""
    open_axes(axes, title=f"activations at the peak, MiB{fixed}", xlabel=what, ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks([row[axis] for row in rows], [str(row[axis]) for row in rows])
    axes.minorticks_off()


def main() -> None:
    command = Command(
        "capacity", __doc__, show=show, draw=draw, sizes=LADDERS, peers=PEERS, devices=True, seconds="experiment"
    )
    command.add("--models", nargs="+", choices=list(LADDERS["small"]), default=list(LADDERS["small"]))
    command.add("--partitions", nargs="+", type=int, help="n: 1, 2, 4 and 8, as far as there are GPUs")
    command.add("--chunks", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="m, of the second question")
    command.add("--limit", type=float, help="MiB a partition on the CPU (4), GiB a device on GPUs (all it has)")
    command.add("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    args = command.parse()

    on_cpu = args.devices == ["cpu"]
    args.partitions = args.partitions or [n for n in (1, 2, 4, 8) if n <= (4 if on_cpu else len(args.devices))]
    limit = args.limit or (4.0 if on_cpu else None)
    args.limit = None if limit is None else limit * (MIB if on_cpu else GIB)
    piped = sum(name != "plain" for name in args.peers)
    climbs = len(args.models) * (len(args.partitions) * piped + ("plain" in args.peers))
    progress = Progress(climbs * ("largest" in args.questions) + len(list(sweep(args))) * ("growth" in args.questions))
    command.finish(
        unit="bytes",
        size=args.size,
        devices=args.devices,
        limit=limit,
        published={"by": "torchgpipe 0.0.3, in its documentation", "on": "Tesla P40", "figures": PUBLISHED},
        largest=largest(args, progress) if "largest" in args.questions else [],
        growth=growth(args, progress) if "growth" in args.questions else [],
    )


if __name__ == "__main__":
    main()
