"""Peak memory of a step: ours beside the original and the plain model; the largest model; and what skips copy.

Checkpointing is done for memory alone, so every byte that a pipeline keeps too long undoes it. The bytes of all tensors
alive are counted, not those of the process, above the level at rest (`allocations.py` says how); the same number comes
out every time, which the result records.

    peaks       six models of eight layers, m = 4 and 32. A micro-batch has the same size at every m, so a larger m adds
                what a pipeline keeps of a micro-batch: with checkpointing little more than the activations at the
                partitions' ends
    random      the same of random models (`random_models.py`), in which parameters are little or most of the memory
    capacity    the largest model that fits, and what the peak depends on (`memory_capacity.py`)
    first       the first sixteen steps of a model whose micro-batches take much and its parameters nothing, also in
                resident memory: recomputation compares more in them, and the allocator of the host keeps what it frees
    copies      the bytes of a U-Net's skips between devices, through portals and in tuples (`memory_copies.py`)

What each device saves for backward under each schedule is a part of `schedules.py`.

    python -m benchmarks.memory                          # peaks: a minute
    python -m benchmarks.memory --size full              # wide models too; m = 4, 8, 16, 32; n = 2, 4, 8; workers
    python -m benchmarks.memory --size full --device cuda:0
    python -m benchmarks.memory --only capacity          # some minutes
    python -m benchmarks.memory --only capacity --size paper --limit 22.4    # on GPUs, as many GiB as a Tesla P40 has
    python -m benchmarks.memory --only random --seeds 200 400                # other models than the first 200
    python -m benchmarks.memory --only first --beside /tmp/997827f           # with another checkout as a peer
    python -m benchmarks.memory --only copies                                # seconds
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import memory_capacity, memory_copies
from benchmarks.cost import MODES
from benchmarks.memory_steps import LAYERS, MODELS
from benchmarks.peers import PEERS, Answer, Request, running
from benchmarks.placement import threaded
from benchmarks.program import Part, Program, Progress
from benchmarks.random_models import random_model
from benchmarks.records import MIB, Row, table, table_of

__all__ = ["PARTS"]
CHILD = "memory_steps.py"
NARROW = ("conv", "transformer", "mlp")

#: The largest ratio of our peak to the original's that is aimed at.
TARGET = 1.0


# ---- Peaks of models of eight layers.


def requests(args: argparse.Namespace) -> list[Request]:
    shapes = [(4, 4, "inline"), (4, 32, "inline")]
    if args.size == "full":
        shapes = [(4, m, "inline") for m in (4, 8, 16, 32)] + [(n, 8, "inline") for n in (2, 8)]
        if args.device == "cpu":
            shapes.append((4, 8, "workers"))
    # The wide ones are for the memory of gradients.
    models = [name for name in MODELS if name in args.models and (args.size == "full" or name in NARROW)]
    return [
        {"model": model, "mode": mode, "balance": [LAYERS // n] * n, "m": m, "threads": threads}
        | {"accumulate": accumulate, "device": args.device, "steps": args.steps, "scale": args.scale}
        for model, accumulate, mode, (n, m, threads) in product(models, (False, True), MODES, shapes)
    ]


def peaks(args: argparse.Namespace) -> dict[str, Any]:
    """Count each request. The count is exact, so there are no turns."""
    rows = []
    asked = requests(args)
    progress = Progress(len(asked))
    names = [name for name in PEERS if name in args.peers]
    with running(names, CHILD) as peers:
        for request in asked:
            if args.seconds.spent():
                break
            progress(", ".join(str(request[key]) for key in ("model", "mode", "m", "threads")))
            n = len(request["balance"])
            devices = {name: threaded(name, request["threads"], n, args.device) for name in peers}
            answers = {name: peer.ask({**request, "devices": devices[name]}) for name, peer in peers.items()}
            rows.append(row_of(request, answers))
    return {"unit": "bytes", "rows": rows, "growth": growth(rows, names)}


def row_of(request: Request, answers: dict[str, Answer]) -> Row:
    row: Row = {
        "model": request["model"],
        "n": len(request["balance"]),
        "m": request["m"],
        "mode": request["mode"],
        "threads": request["threads"],
        "gradients": "present" if request["accumulate"] else "absent",
    }
    row |= answers
    if "ours" in answers and "original" in answers:
        row["ratio"] = answers["ours"]["peak"] / answers["original"]["peak"]
    return row


def growth(rows: list[Row], peers: list[str]) -> list[Row]:
    """Return the bytes that each further micro-batch adds to the peak, from the smallest m to the largest."""
    sweeps: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if (row["n"], row["threads"]) == (4, "inline"):
            sweeps.setdefault(_key(row), []).append(row)
    grown = []
    for (model, gradients, mode), sweep in sweeps.items():
        low, high = min(sweep, key=lambda row: row["m"]), max(sweep, key=lambda row: row["m"])
        if low is high:  # The time was up.
            continue
        added = {name: (high[name]["peak"] - low[name]["peak"]) / (high["m"] - low["m"]) for name in peers}
        grown.append({"model": model, "gradients": gradients, "mode": mode, **added})
    return grown


def _key(row: Row) -> tuple[str, str, str]:
    return row["model"], row["gradients"], row["mode"]


def memory(result: dict[str, Any]) -> str:
    """Return a table of the ratios of the peaks, and of what each further micro-batch adds."""
    peers = [name for name in PEERS if name in result["growth"][0]]
    lines = []
    for more in result["growth"]:
        rows = [row for row in result["rows"] if _key(row) == _key(more) and row["threads"] == "inline"]
        over = [row["ratio"] for row in rows if "ratio" in row]
        lines.append([*_key(more), f"{min(over):.3f} - {max(over):.3f}" if over else "-"])
        lines[-1] += [f"{more[name] / 1024:.0f}" for name in peers]
    return table(lines, ["model", "gradients", "mode", "ours/original", *(f"{name}, KiB" for name in peers)])


def memory_by_mode(result: dict[str, Any]) -> str:
    """Return a table of the peaks of the transformer on four partitions."""
    modes = ("never", "except_last", "always")
    by_way = {
        (row["m"], row["mode"]): row
        for row in result["rows"]
        if (row["model"], row["n"], row["threads"], row["gradients"]) == ("transformer", 4, "inline", "absent")
    }

    def peak(mode: str, peer: str) -> Callable[[int], str]:
        return lambda m: f"{by_way[m, mode][peer]['peak'] / MIB:.1f}" if peer in by_way[m, mode] else "-"

    columns: dict[str, Any] = {"micro-batches": lambda m: m, "plain": peak("always", "plain")}
    columns |= {f"`'{mode}'`": peak(mode, "ours") for mode in modes}
    columns["original, `'always'`"] = peak("always", "original")
    return table_of(sorted({m for m, _ in by_way}), columns)


def notes(result: dict[str, Any]) -> list[str]:
    unsteady = [_key(row) for row in result["rows"] if not all(row[p]["same_each_step"] for p in PEERS if p in row)]
    # No target for workers: they compute at the same time, and here they share a memory that devices would not share.
    compared = [row["ratio"] for row in result["rows"] if row["threads"] == "inline" and "ratio" in row]
    over = sum(ratio > TARGET for ratio in compared)
    return [
        f"figures that differed between steps: {unsteady or 'none'}",
        f"above {TARGET} of the original's peak: {over} of {len(compared)} rows",
    ]


# ---- Peaks of random models.

#: Up to these ratios models are counted.
STEPS = (1.0, 1.001, 1.01, 1.1)


def random(args: argparse.Namespace) -> dict[str, Any]:
    """Count a step of each random model, ours and the original's."""
    rows = []
    seeds = range(*args.seeds)
    progress = Progress(len(seeds))
    with running(("ours", "original"), CHILD) as peers:
        for seed in seeds:
            drawn = random_model(seed)
            progress(drawn.about)
            shared = {"seed": seed, "mode": drawn.mode, "balance": drawn.balance, "m": drawn.m}
            where = {"device": "cpu", "devices": ["cpu"] * len(drawn.balance)}
            request = {**shared, "accumulate": drawn.accumulate, **where, "steps": 1}
            peaks_of = {name: peer.ask(request)["peak"] for name, peer in peers.items()}
            about = {"about": drawn.about, "gradients": "present" if drawn.accumulate else "absent"}
            rows.append({**shared, **about, **peaks_of, "ratio": peaks_of["ours"] / peaks_of["original"]})
    ratios = [row["ratio"] for row in rows]
    up_to = {str(step): sum(ratio <= step for ratio in ratios) for step in STEPS}
    counts = {"models": len(rows), "up to": up_to, "median": statistics.median(ratios), "highest": max(ratios)}
    return {"unit": "bytes", "counts": counts, "rows": sorted(rows, key=lambda row: -row["ratio"])}


def random_memory(result: dict[str, Any]) -> str:
    columns: dict[str, Any] = {"models": "models"}
    columns |= {
        f"at most {step}": lambda counts, step=step: counts["up to"][step] for step in result["counts"]["up to"]
    }
    return table_of([result["counts"]], {**columns, "median": "median:.3f", "highest": "highest:.3f"})


# ---- The first steps.


def first(args: argparse.Namespace) -> dict[str, Any]:
    """Take the peaks of the first steps, each way in a process of its own."""
    names = [name for name in ("ours", "original") if name in args.peers]
    peers = {**dict(zip(names, names)), **({args.beside.name: f"{args.beside.resolve()}"} if args.beside else {})}
    rows = []
    asked = list(product(MODES, ("tensors", "resident"), peers))
    progress = Progress(len(asked))
    for mode, counts, name in asked:
        progress(f"{mode}, {counts}, {name}")
        request = {"first": args.first, "mib": args.mib, "mode": mode, "counts": counts, "m": 4}
        request |= {"balance": [4, 4, 4], "devices": ["cpu"] * 3}
        with running([peers[name]], CHILD) as one:
            rows.append({"mode": mode, "counts": counts, "peer": name, **one[peers[name]].ask(request)})
    return {"unit": "bytes", "rows": rows}


def first_memory(result: dict[str, Any]) -> str:
    """Return a table of the first peak, and of the lowest and the highest of all, in MiB."""
    columns: dict[str, Any] = {"mode": "mode", "counted": "counts", "peer": "peer"}
    columns["first step"] = lambda row: f"{row['peaks'][0] / MIB:.0f}"
    columns["all steps"] = lambda row: f"{min(row['peaks']) / MIB:.0f} - {max(row['peaks']) / MIB:.0f}"
    return table_of(result["rows"], columns)


PARTS = {
    "first": Part("first_memory", first, {"peaks of the first steps, MiB": first_memory}, cpu=True),
    "peaks": Part(
        "memory",
        peaks,
        {
            "ratio of peaks above rest, and KiB that each further micro-batch adds": memory,
            "peaks of the transformer, MiB": memory_by_mode,
        },
        notes,
    ),
    "random": Part(
        "random_memory",
        random,
        {"ours/original": random_memory},
        cpu=True,
    ),
    "capacity": Part(
        "capacity",
        memory_capacity.measure,
        {
            "the largest model that fits": memory_capacity.capacity,
            "resnet101: activations at the peak": memory_capacity.capacity_growth,
        },
        memory_capacity.notes,
    ),
    "copies": Part(
        "skips",
        memory_copies.measure,
        {"MB copied in a step": memory_copies.skips},
    ),
}


def main() -> None:
    models = [*MODELS, *memory_capacity.LADDERS["small"]]
    choices: Any = {"sizes": ("small", "full", "gpu", "paper"), "peers": PEERS}
    program = Program("memory", __doc__, PARTS, ("peaks",), device=True, devices=True, seconds="peak", **choices)
    program.add("--models", nargs="+", choices=models, default=models, help="of peaks and capacity")
    program.add("--steps", type=int, default=3, help="of peaks; the largest figure is kept")
    program.add("--scale", type=int, default=1, help="how many times the usual rows of a micro-batch, of peaks")
    program.add("--seeds", nargs=2, type=int, default=[0, 200], metavar=("FIRST", "END"), help="of random")
    program.add("--questions", nargs="+", choices=memory_capacity.QUESTIONS, default=list(memory_capacity.QUESTIONS))
    program.add("--partitions", nargs="+", type=int, help="n, of capacity: 1, 2, 4 and 8, as far as there are GPUs")
    program.add("--chunks", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="m, of the growth of capacity")
    program.add("--limit", type=float, help="of capacity: MiB a partition on the CPU (4), GiB a device on GPUs (all)")
    program.add("--first", type=int, default=16, help="steps of first")
    program.add("--mib", type=int, default=40, help="of a micro-batch of first")
    program.add("--beside", type=Path, help="another checkout, a further peer of first")
    program.add("--unet", nargs=4, type=int, default=[4, 16, 128, 8], metavar=("DEPTH", "WIDTH", "SIZE", "BATCH"))
    program.run()


if __name__ == "__main__":
    main()
