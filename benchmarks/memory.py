"""Peak memory of a step: ours beside the original and the plain model.

Checkpointing is done for memory alone, so every byte that a pipeline keeps too long undoes it. Counted are
the bytes of all tensors alive, not of the process, above the level at rest (`allocations.py` says how). A
micro-batch has the same size at every m: what a larger m adds is what a pipeline keeps of a micro-batch,
and with checkpointing this should be little more than the activations at the partitions' ends.

    python -m benchmarks.memory                          # m = 4 and 32
    python -m benchmarks.memory --size full              # wide models too; m = 4, 8, 16, 32; n = 2, 4, 8; workers
    python -m benchmarks.memory --size full --device cuda:0
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS, Answer, Peer, Request
from benchmarks.records import RESULTS, environment, table, write

MODES = ("always", "except_last", "never")
#: Of each size. The wide ones are for the memory of gradients.
NARROW = ("conv", "transformer", "mlp")
MODELS = {"small": NARROW, "full": (*NARROW, *(f"wide {model}" for model in NARROW))}
LAYERS = 8

#: Ours is to need at most this many times the original's peak.
TARGET = 1.0


def devices(peer: str, request: Request) -> list[str]:
    """As in overhead.py: with 'workers' ours has a device, and so a worker, for each partition."""
    n = len(request["balance"])
    if request["threads"] == "workers" and peer == "ours":
        return [f"cpu:{j}" for j in range(n)]
    return [request["device"]] * n


def requests(size: str, models: Sequence[str], device: str, steps: int, scale: int) -> list[Request]:
    shapes = [(4, 4, "inline"), (4, 32, "inline")]
    if size == "full":
        shapes = [(4, m, "inline") for m in (4, 8, 16, 32)] + [(n, 8, "inline") for n in (2, 8)]
        if device == "cpu":
            shapes.append((4, 8, "workers"))

    return [
        {
            "model": model,
            "mode": mode,
            "balance": [LAYERS // n] * n,
            "m": m,
            "threads": threads,
            "accumulate": accumulate,
            "device": device,
            "steps": steps,
            "scale": scale,
        }
        for model in models
        for accumulate in (False, True)
        for mode in MODES
        for n, m, threads in shapes
    ]


def measure(peers: list[str], asked: list[Request]) -> list[dict[str, Answer]]:
    """For each request the answer of each peer. The count is exact: there are no rounds."""
    plain: dict[tuple[object, ...], Answer] = {}
    measured = []
    with ExitStack() as stack:
        running = {name: stack.enter_context(Peer(name, "allocations.py")) for name in peers}
        for request in asked:
            answers = {}
            # The plain model knows no modes: it is asked once.
            same = (request["model"], request["m"], request["accumulate"])
            for name, peer in running.items():
                if name == "plain" and same in plain:
                    answers[name] = plain[same]
                    continue
                answers[name] = peer.ask({**request, "devices": devices(name, request)})
                if name == "plain":
                    plain[same] = answers[name]
            measured.append(answers)
    return measured


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


def growth(rows: list[dict[str, Any]], peers: list[str], models: Sequence[str]) -> list[dict[str, Any]]:
    """What each further micro-batch adds to the peak, from the smallest m to the largest."""
    grown = []
    for model in models:
        for gradients in ("absent", "present"):
            for mode in MODES:
                sweep = [
                    row
                    for row in rows
                    if (row["model"], row["gradients"], row["mode"]) == (model, gradients, mode)
                    and (row["n"], row["threads"]) == (4, "inline")
                ]
                low, high = min(sweep, key=lambda row: row["m"]), max(sweep, key=lambda row: row["m"])
                figures: dict[str, Any] = {
                    "model": model,
                    "gradients": gradients,
                    "mode": mode,
                    "boundary": low["boundary"],
                }
                for name in peers:
                    added = high[name]["peak"] - low[name]["peak"]
                    figures[name] = added / (high["m"] - low["m"])
                grown.append(figures)
    return grown


def kib(value: float) -> str:
    return f"{value / 1024:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=["small", "full"], default="small")
    parser.add_argument("--models", nargs="+", choices=MODELS["full"], help="all of that size, if none is given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=3, help="steps counted; their largest figure is kept")
    parser.add_argument("--scale", type=int, default=1, help="how many times the usual rows of a micro-batch")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    models = args.models or MODELS[args.size]
    asked = requests(args.size, models, args.device, args.steps, args.scale)
    measured = measure(args.peers, asked)
    rows = [summary(request, answers) for request, answers in zip(asked, measured, strict=True)]
    grown = growth(rows, args.peers, models)

    header = ["model", "gradients", "mode", "threads", "n", "m", *args.peers, "ours/original"]
    lines = [
        [
            *(row[key] for key in header[:6]),
            *(kib(row[name]["peak"]) for name in args.peers),
            f"{row['ratio']:.4f}" if "ratio" in row else "-",
        ]
        for row in rows
    ]
    print("\npeak above rest, KiB\n\n" + table(lines, header))

    header = ["model", "gradients", "mode", "boundary", *args.peers]
    lines = [[*(g[key] for key in header[:3]), *(kib(g[key]) for key in header[3:])] for g in grown]
    print(
        "\nKiB that each further micro-batch adds (boundary: its activations at the partitions' ends)\n\n"
        + table(lines, header)
    )

    unsteady = [
        (row["model"], row["mode"], row["threads"], name)
        for row in rows
        for name in args.peers
        if not row[name]["same_each_step"]
    ]
    print(f"\nfigures that differed between steps: {unsteady or 'none'}")
    if "ratio" in rows[0]:
        # Workers compute side by side, here in one memory: on devices each has its own. No target for them.
        compared = [row for row in rows if row["threads"] == "inline"]
        over = [row for row in compared if row["ratio"] > TARGET]
        print(f"above {TARGET} of the original's peak: {len(over)} of {len(compared)} rows")

    name = "memory.json" if args.device == "cpu" else "memory-cuda.json"
    write(
        args.json or RESULTS / name,
        {
            "unit": "bytes",
            "environment": environment(),
            "device": args.device,
            "scale": args.scale,
            "rows": rows,
            "growth": grown,
        },
    )


if __name__ == "__main__":
    main()
