"""Host time per cell: ours beside the original and the plain layers.

A pipeline is worth its devices only if the host keeps them busy: what the host spends on a cell besides
the layers themselves is lost on every device that waits for it. So the layers here are so tiny that host
time is all there is (`steps.py`), and each peer runs in a process of its own (`peers.py`). A round starts
fresh processes; within it they are asked in turn, A B A B, the same number of steps each. A turn's figure
is its lowest step, because what is above it is the machine's; every figure shown is a median over turns.

    python -m benchmarks.overhead               # all modes, in the caller's thread and through workers
    python -m benchmarks.overhead --size full   # and growth with cells and partitions, and 2000 layers
    python -m benchmarks.overhead --device cuda:0   # of layers on a GPU, and on it and the CPU in turn
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS, Answer, Peer, Request
from benchmarks.records import RESULTS, Budget, environment, ratios, shown, spread, table, write

MODES = ("always", "except_last", "never")
PARTS = ("forward", "backward")

#: How many times lower than the original's, at least: (forward, backward); None where nothing is promised.
TARGETS: dict[str, tuple[float, float | None]] = {"inline": (4.0, 1.7), "workers": (1.3, None)}
#: Parameters in a cell: a block of a transformer, and four of them with a Linear.
SEVERAL = (12, 50)
#: How much a cell's time may grow over a sweep.
GROWTH = 1.6

Measured = dict[str, list[Answer]]  # peer -> one answer a round


def devices(peer: str, threads: str, n: int, device: str = "cpu") -> list[str]:
    """'inline' is one device for all; 'workers' is a device, and so in ours a worker, for each partition.

    Beside one GPU there is only the CPU: there 'workers' has both in turn, with a copy at each boundary.

    The original runs every partition of 'cpu' in one worker thread, and makes no difference between
    'cpu:0' and 'cpu:1': both of its columns are the same.
    """
    if device != "cpu":
        both = [device, "cpu"] if threads == "workers" and peer != "plain" else [device]
        return [both[j % len(both)] for j in range(n)]
    if threads == "workers" and peer == "ours":
        return [f"cpu:{j}" for j in range(n)]
    return ["cpu"] * n


def cells(n: int, m: int, mode: str, threads: str = "inline") -> Request:
    return {
        "kind": "step",
        "n": n,
        "m": m,
        "mode": mode,
        "threads": threads,
        "balance": [1] * n,
        "steps": max(3, 1600 // (n * m)),
        "turns": 1,
    }


def requests(n: int, m: int, size: str, turns: int) -> list[Request]:
    """All that is measured in a round."""
    asked = [{**cells(n, m, mode, threads), "turns": turns} for threads in ("inline", "workers") for mode in MODES]
    asked += [
        {**cells(4, 8, mode), "parameters": count, "steps": 300 // count, "turns": turns}
        for count in SEVERAL
        for mode in MODES
    ]
    if size == "full":
        for mode in ("always", "never"):
            asked += [cells(8, count, mode) for count in (8, 32, 128, 512)]
            asked += [cells(count, 32, mode) for count in (2, 8, 32, 64)]
        asked += [{**cells(8, 4, mode), "kind": "deep", "balance": [250] * 8} for mode in MODES]
    return asked


def measure(peers: list[str], asked: list[Request], rounds: int, device: str, budget: Budget) -> list[Measured]:
    """One list of answers a request, by peer: one answer a turn."""
    measured: list[Measured] = [{name: [] for name in peers} for _ in asked]
    for round in range(rounds):
        if round and budget.spent():
            break
        # Every other round starts from the other end: who comes first has no advantage.
        order = peers if round % 2 == 0 else peers[::-1]
        with ExitStack() as stack:
            running = {name: stack.enter_context(Peer(name, "steps.py")) for name in order}
            # The plain layers know no modes and no devices: they are asked once for each size.
            plain: dict[tuple[object, ...], list[Answer]] = {}
            for request, answers in zip(asked, measured, strict=True):
                size = (request["kind"], request["n"], request["m"], request.get("parameters"))
                known = plain.get(size)
                for _ in range(request["turns"]):
                    for name, peer in running.items():
                        if name != "plain" or known is None:
                            where = devices(name, request["threads"], request["n"], device)
                            answers[name].append(peer.ask({**request, "devices": where}))
                if known is not None:
                    answers["plain"] += known[: request["turns"]]
                elif "plain" in running:
                    plain[size] = answers["plain"][-request["turns"] :]
        print(f"round {round + 1} of {rounds} done", flush=True)
    return measured


def summary(request: Request, measured: Measured, parts: tuple[str, ...]) -> dict[str, Any]:
    """A row of the result: each peer's figures, turn by turn and as a spread, and the ratio original / ours."""
    row: dict[str, Any] = {key: request[key] for key in ("n", "m", "mode", "threads", "parameters") if key in request}
    for part in parts:
        figures = {name: [answer[part] for answer in answers] for name, answers in measured.items()}
        row[part] = {name: {**spread(values), "turns": values} for name, values in figures.items()}
        for name, answers in measured.items():
            for more in ("cpu", "typical", "cpu_typical"):
                if f"{part}_{more}" in answers[0]:
                    values = [answer[f"{part}_{more}"] for answer in answers]
                    row[part][name][more] = {**spread(values), "turns": values}
        if "ours" in figures and "original" in figures:
            row[part]["ratio"] = ratios(figures["ours"], figures["original"])
            if "cpu" in row[part]["ours"]:
                cpu = [row[part][name]["cpu"]["turns"] for name in ("ours", "original")]
                row[part]["ratio_cpu"] = ratios(*cpu)
    return row


def growth(rows: list[dict[str, Any]], axis: str, peers: list[str]) -> list[dict[str, Any]]:
    """Along one axis, by mode and part: the largest size's CPU time per cell over the smallest's, as a spread.

    Of CPU time: sizes are not measured within seconds of each other, and a neighbour's load is no growth.
    """
    grown = []
    for mode in MODES:
        sweep = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row[axis])
        if not sweep:
            continue
        for part in PARTS:
            small, large = sweep[0][part], sweep[-1][part]
            figures = {name: ratios(small[name]["cpu"]["turns"], large[name]["cpu"]["turns"]) for name in peers}
            grown.append({"axis": axis, "mode": mode, "part": part, **figures})
    return grown


def verdict(row: dict[str, Any], part: str) -> str:
    target = TARGETS[row["threads"]][PARTS.index(part)]
    if target is None or "ratio" not in row[part]:
        return "-"
    return f"{target}: {'met' if row[part]['ratio']['median'] >= target else 'MISSED'}"


def print_rows(
    title: str,
    rows: list[dict[str, Any]],
    peers: list[str],
    parts: tuple[str, ...] = PARTS,
    *,
    targets: bool = False,
) -> None:
    header = ["threads", "n", "m", "parameters", "mode", "part", *peers, "original/ours", "of CPU time"]
    lines = []
    for row in rows:
        for part in parts:
            figures = [shown(row[part][name]) for name in peers]
            ratio = [shown(row[part][key], 2) if key in row[part] else "-" for key in ("ratio", "ratio_cpu")]
            size = [row["threads"], row["n"], row["m"], row.get("parameters", 2)]
            lines.append([*size, row["mode"], part, *figures, *ratio])
            if targets:
                lines[-1].append(verdict(row, part))
    print(f"\n{title}\n\n" + table(lines, header + (["target"] if targets else [])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=["small", "full"], default="small")
    parser.add_argument("--rounds", type=int, default=4, help="of fresh processes")
    parser.add_argument("--turns", type=int, default=3, help="of each peer in a round")
    parser.add_argument("--seconds", type=Budget, default=Budget(), help="start no further round after so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--partitions", type=int, default=8, help="n")
    parser.add_argument("--chunks", type=int, default=32, help="m")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", type=Path, default=RESULTS / "overhead.json")
    args = parser.parse_args()

    asked = requests(args.partitions, args.chunks, args.size, args.turns)
    before = environment()
    measured = measure(args.peers, asked, args.rounds, args.device, args.seconds)

    modes, several, cell_sweep, partition_sweep, deep = [], [], [], [], []
    head = (2 + len(SEVERAL)) * len(MODES)
    for index, (request, answers) in enumerate(zip(asked, measured, strict=True)):
        if request["kind"] == "deep":
            deep.append(summary(request, answers, ("construct", *PARTS)))
        elif "parameters" in request:
            several.append(summary(request, answers, PARTS))
        elif index < head:
            modes.append(summary(request, answers, PARTS))
        elif (index - head) % 8 < 4:
            cell_sweep.append(summary(request, answers, PARTS))
        else:
            partition_sweep.append(summary(request, answers, PARTS))

    print_rows("us per cell: median of turns (lowest-highest turn)", modes, args.peers, targets=True)
    print_rows("us per cell of several parameters", several, args.peers)
    result: dict[str, Any] = {
        "unit": "us per cell; deep: ms",
        "environment": before,
        "device": args.device,
        "rounds": args.rounds,
        "turns": args.turns,
        "modes": modes,
        "several": several,
    }
    if args.size == "full":
        grown = growth(cell_sweep, "m", args.peers) + growth(partition_sweep, "n", args.peers)
        print_rows("growth, us per cell", cell_sweep + partition_sweep, args.peers)
        header = ["axis", "mode", "part", *args.peers]
        lines = [[g["axis"], g["mode"], g["part"], *(shown(g[name], 2) for name in args.peers)] for g in grown]
        print(f"\nlargest size's CPU time per cell over the smallest's (at most {GROWTH})\n\n" + table(lines, header))
        print_rows("2000 layers, ms", deep, args.peers, ("construct", *PARTS))
        result |= {"cells": cell_sweep, "partitions": partition_sweep, "growth": grown, "deep": deep}
    write(args.json, result)


if __name__ == "__main__":
    main()
