"""Peak memory of a step: ours beside the original and the plain model.

Checkpointing is done for memory alone, so every byte that a pipeline keeps too long undoes it. The bytes of
all tensors alive are counted, not those of the process, above the level at rest (`allocations.py` says how). A
micro-batch has the same size at every m, so a larger m adds what a pipeline keeps of a micro-batch. With
checkpointing this should be little more than the activations at the partitions' ends.

    python -m benchmarks.memory                          # m = 4 and 32
    python -m benchmarks.memory --size full              # wide models too; m = 4, 8, 16, 32; n = 2, 4, 8; workers
    python -m benchmarks.memory --size full --device cuda:0
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from benchmarks.cost import MODES
from benchmarks.peers import PEERS, Answer, Request, running
from benchmarks.placement import threaded
from benchmarks.program import Command, Progress
from benchmarks.records import MIB, table

#: Of each size. The wide ones are for the memory of gradients.
NARROW = ("conv", "transformer", "mlp")
MODELS = {"small": NARROW, "full": (*NARROW, *(f"wide {model}" for model in NARROW))}
LAYERS = 8

#: The largest ratio of our peak to the original's that is aimed at.
TARGET = 1.0


def requests(args: argparse.Namespace) -> list[Request]:
    shapes = [(4, 4, "inline"), (4, 32, "inline")]
    if args.size == "full":
        shapes = [(4, m, "inline") for m in (4, 8, 16, 32)] + [(n, 8, "inline") for n in (2, 8)]
        if args.device == "cpu":
            shapes.append((4, 8, "workers"))
    common = {"device": args.device, "steps": args.steps, "scale": args.scale}
    return [
        {"model": model, "mode": mode, "balance": [LAYERS // n] * n, "m": m, "threads": threads, **common}
        | {"accumulate": accumulate}
        for model, accumulate, mode, (n, m, threads) in product(
            args.models or MODELS[args.size], (False, True), MODES, shapes
        )
    ]


def measure(names: list[str], asked: list[Request]) -> list[dict[str, Any]]:
    """Return a row for each request. The count is exact, so there are no rounds."""
    rows = []
    progress = Progress(len(asked))
    with running(names, "allocations.py") as peers:
        for request in asked:
            progress(", ".join(str(request[key]) for key in ("model", "mode", "m", "threads")))
            n = len(request["balance"])
            devices = {name: threaded(name, request["threads"], n, request["device"]) for name in peers}
            answers = {name: peer.ask({**request, "devices": devices[name]}) for name, peer in peers.items()}
            rows.append(summary(request, answers))
    return rows


def summary(request: Request, answers: dict[str, Answer]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": request["model"],
        "n": len(request["balance"]),
        "m": request["m"],
        "mode": request["mode"],
        "threads": request["threads"],
        "gradients": "present" if request["accumulate"] else "absent",
        "boundary": next(iter(answers.values()))["boundary"],
    }
    for name, answer in answers.items():
        row[name] = {key: answer[key] for key in ("forward", "held", "backward", "peak", "same_each_step")}
    if "ours" in answers and "original" in answers:
        row["ratio"] = answers["ours"]["peak"] / answers["original"]["peak"]
    return row


def growth(rows: list[dict[str, Any]], peers: list[str]) -> list[dict[str, Any]]:
    """Return the bytes that each further micro-batch adds to the peak, from the smallest m to the largest."""
    sweeps: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if (row["n"], row["threads"]) == (4, "inline"):
            sweeps.setdefault(_key(row), []).append(row)
    grown = []
    for (model, gradients, mode), sweep in sweeps.items():
        low, high = min(sweep, key=lambda row: row["m"]), max(sweep, key=lambda row: row["m"])
        added = {name: (high[name]["peak"] - low[name]["peak"]) / (high["m"] - low["m"]) for name in peers}
        about = {"model": model, "gradients": gradients, "mode": mode, "boundary": low["boundary"]}
        grown.append({**about, **added})
    return grown


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["gradients"], row["mode"]


# ---- Tables of a result.


def memory(result: dict[str, Any]) -> str:
    """Return a table of the ratios of the peaks, and of what each further micro-batch adds."""
    peers = [name for name in PEERS if name in result["growth"][0]]
    lines = []
    for more in result["growth"]:
        found = [row for row in result["rows"] if _key(row) == _key(more) and row["threads"] == "inline"]
        over = [row["ratio"] for row in found if "ratio" in row]
        lines.append([*_key(more), f"{min(over):.3f} - {max(over):.3f}" if over else "-"])
        lines[-1] += [f"{more[name] / 1024:.0f}" for name in peers]
    return table(lines, ["model", "gradients", "mode", "ours/original", *(f"{name}, KiB" for name in peers)])


def memory_by_mode(result: dict[str, Any]) -> str:
    """Return a table of the peaks of the transformer on four partitions."""
    modes = ("never", "except_last", "always")
    found = {
        (row["m"], row["mode"]): row
        for row in result["rows"]
        if (row["model"], row["n"], row["threads"], row["gradients"]) == ("transformer", 4, "inline", "absent")
    }
    lines = []
    for m in sorted({m for m, _ in found}):
        peaks = [found[m, mode]["ours"]["peak"] for mode in modes]
        all_peaks = [found[m, "always"]["plain"]["peak"], *peaks, found[m, "always"]["original"]["peak"]]
        lines.append([m, *(f"{peak / MIB:.1f}" for peak in all_peaks)])
    return table(lines, ["micro-batches", "plain", *(f"`'{mode}'`" for mode in modes), "original, `'always'`"])


def show(result: dict[str, Any]) -> dict[str, str]:
    told = {"ratio of peaks above rest, and KiB that each further micro-batch adds": memory(result)}
    unsteady = [_key(row) for row in result["rows"] if not all(row[p]["same_each_step"] for p in PEERS if p in row)]
    told[f"figures that differed between steps: {unsteady or 'none'}"] = ""
    # No target for workers: they compute at the same time, and here they share a memory that devices would not share.
    compared = [row["ratio"] for row in result["rows"] if row["threads"] == "inline" and "ratio" in row]
    over = sum(ratio > TARGET for ratio in compared)
    told[f"above {TARGET} of the original's peak: {over} of {len(compared)} rows"] = ""
    return told


def main() -> None:
    command = Command("memory", __doc__, show=show, sizes=MODELS, peers=PEERS, device=True)
    command.add("--models", nargs="+", choices=MODELS["full"], help="all of that size, if none is given")
    command.add("--steps", type=int, default=3, help="steps counted; their largest figure is kept")
    command.add("--scale", type=int, default=1, help="how many times the usual rows of a micro-batch")
    args = command.parse()
    rows = measure(args.peers, requests(args))
    about = {"device": args.device, "scale": args.scale}
    command.finish(unit="bytes", **about, rows=rows, growth=growth(rows, args.peers))


if __name__ == "__main__":
    main()
