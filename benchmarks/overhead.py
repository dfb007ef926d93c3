"""Host time per cell: ours beside the original and the plain layers.

A pipeline is worth its devices only if the host keeps them busy: host time that a cell takes beside its layers is
lost on every device that waits for it. So the layers here are so tiny that nearly all time is host time
(`tiny_steps.py`), and each peer runs in a process of its own (`peers.py`). A round starts fresh processes; within
it they are asked in turn, A B A B, the same number of steps each. A turn's figure is its lowest step, because time
above the lowest is the machine's. Every figure shown is a median over turns.

    python -m benchmarks.overhead               # all modes, in the caller's thread and through workers
    python -m benchmarks.overhead --size full   # and growth with cells and partitions, and 2000 layers
    python -m benchmarks.overhead --device cuda:0   # of layers on a GPU, and on it and the CPU in turn
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.cost import MODES
from benchmarks.peers import PEERS, Answer, Request, running
from benchmarks.placement import threaded
from benchmarks.program import Command, Progress
from benchmarks.records import PARTS, ratios, shown, spread, table

#: Parameters in a cell: a block of a transformer, and four of them with a Linear.
SEVERAL = (12, 50)
RATIOS = {"ratio": "original/ours", "ratio_cpu": "of CPU time"}

Measured = dict[str, list[Answer]]  # peer -> one answer a turn


def cells(group: str, n: int, m: int, mode: str, threads: str = "inline", **more: Any) -> Request:
    """Return a request for steps of m micro-batches through n layers, each a partition."""
    shape = {"n": n, "m": m, "mode": mode, "threads": threads, "balance": [1] * n}
    return {"group": group, "kind": "step", **shape, "steps": max(3, 1600 // (n * m)), "turns": 1, **more}


def requests(n: int, m: int, size: str, turns: int) -> list[Request]:
    """Return all that is measured in a round; of `group` is the list of the result that it ends in."""
    asked = [cells("modes", n, m, mode, threads, turns=turns) for threads in ("inline", "workers") for mode in MODES]
    asked += [
        cells("several", 4, 8, mode, parameters=count, steps=300 // count, turns=turns)
        for count in SEVERAL
        for mode in MODES
    ]
    if size == "full":
        for mode in ("always", "never"):
            asked += [cells("cells", 8, count, mode) for count in (8, 32, 128, 512)]
            asked += [cells("partitions", count, 32, mode) for count in (2, 8, 32, 64)]
        asked += [cells("deep", 8, 4, mode, kind="deep", balance=[250] * 8) for mode in MODES]
    return asked


def measure(args: argparse.Namespace, asked: list[Request]) -> list[Measured]:
    """Return for each request the answers of each peer, one a turn."""
    measured: list[Measured] = [{name: [] for name in args.peers} for _ in asked]
    progress = Progress(args.rounds)
    for round in range(args.rounds):
        if round and args.seconds.spent():
            break
        progress("round")
        # Every other round asks in reverse order, so that no peer profits from being first.
        with running(args.peers[:: -1 if round % 2 else 1], "tiny_steps.py") as peers:
            for request, answers in zip(asked, measured, strict=True):
                for _ in range(request["turns"]):
                    for name, peer in peers.items():
                        devices = threaded(name, request["threads"], request["n"], args.device)
                        answers[name].append(peer.ask({**request, "devices": devices}))
    return measured


def summary(request: Request, measured: Measured) -> dict[str, Any]:
    """Return a row of the result: each peer's figures, turn by turn and as a spread, and the ratio original / ours."""
    row: dict[str, Any] = {key: request[key] for key in ("n", "m", "mode", "threads", "parameters") if key in request}
    for part in ("construct", *PARTS) if request["kind"] == "deep" else PARTS:
        of_part = row[part] = {name: _turns(answers, part) for name, answers in measured.items()}
        for name, answers in measured.items():
            for more in ("cpu", "typical", "cpu_typical"):
                if f"{part}_{more}" in answers[0]:
                    of_part[name][more] = _turns(answers, f"{part}_{more}")
        if "ours" in measured and "original" in measured:
            ours, original = of_part["ours"], of_part["original"]
            of_part["ratio"] = ratios(ours["turns"], original["turns"])
            if "cpu" in ours:
                of_part["ratio_cpu"] = ratios(ours["cpu"]["turns"], original["cpu"]["turns"])
    return row


def _turns(answers: list[Answer], figure: str) -> dict[str, Any]:
    turns = [answer[figure] for answer in answers]
    return {**spread(turns), "turns": turns}


def grown(rows: list[dict[str, Any]], axis: str, peers: list[str]) -> list[dict[str, Any]]:
    """Return, by mode and part, the largest size's CPU time per cell over the smallest's along one axis.

    CPU time, because sizes are measured minutes apart, and another process's load would look like growth.
    """
    found = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        sweep = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row[axis])
        for part in PARTS:
            small, large = sweep[0][part], sweep[-1][part]
            figures = {name: ratios(small[name]["cpu"]["turns"], large[name]["cpu"]["turns"]) for name in peers}
            found.append({"axis": axis, "mode": mode, "part": part, **figures})
    return found


# ---- Tables of a result.


def host_time(result: dict[str, Any]) -> str:
    return _times(result["modes"], ["threads", "mode"], 1)


def several(result: dict[str, Any]) -> str:
    return _times(result["several"], ["parameters", "mode"], 0)


def _times(rows: list[dict[str, Any]], keys: Sequence[str], digits: int) -> str:
    peers = [name for name in PEERS if name in rows[0]["forward"]]
    compared = [key for key in RATIOS if key in rows[0]["forward"]]
    lines = [
        [*(row[key] for key in keys), part]
        + [f"{row[part][name]['median']:.{digits}f}" for name in peers]
        + [shown(row[part][key], 2) for key in compared]
        for row in rows
        for part in PARTS
    ]
    return table(lines, [*keys, "part", *(f"{name}, us" for name in peers), *(RATIOS[key] for key in compared)])


def host_time_by_mode(result: dict[str, Any]) -> str:
    """Return a table of forward and backward together, without workers."""
    lines = [
        [f"`'{row['mode']}'`", *(f"{sum(row[part][peer]['median'] for part in PARTS):.0f}" for peer in PEERS)]
        for row in result["modes"]
        if row["threads"] == "inline"
    ]
    return table(lines, ["checkpoint", *PEERS])


def growth(result: dict[str, Any]) -> str:
    peers = [name for name in PEERS if name in result["growth"][0]]
    sweeps = {"m": "m = 8 to 512, n = 8", "n": "n = 2 to 64, m = 32"}
    lines = [
        [sweeps[row["axis"]], row["mode"], row["part"], *(shown(row[name], 2) for name in peers)]
        for row in result["growth"]
    ]
    return table(lines, ["from, to", "mode", "part", *peers])


def deep(result: dict[str, Any]) -> str:
    parts = ("construct", *PARTS)
    lines = [
        [name, row["mode"], *(shown(row[part][name]) for part in parts)]
        for row in result["deep"]
        for name in PEERS
        if name in row["forward"]
    ]
    return table(lines, ["", "mode", *parts])


def show(result: dict[str, Any]) -> dict[str, str]:
    told = {"us per cell": host_time(result), "us per cell of several parameters": several(result)}
    if "deep" in result:
        told["largest size's CPU time per cell over the smallest's"] = growth(result)
        told["2000 layers, ms"] = deep(result)
    return told


def main() -> None:
    command = Command(
        "overhead", __doc__, show=show, sizes=("small", "full"), peers=PEERS, device=True, seconds="round"
    )
    command.add("--rounds", type=int, default=4, help="of fresh processes")
    command.add("--turns", type=int, default=3, help="of each peer in a round")
    command.add("--partitions", type=int, default=8, help="n")
    command.add("--chunks", type=int, default=32, help="m")
    args = command.parse()

    asked = requests(args.partitions, args.chunks, args.size, args.turns)
    groups: dict[str, Any] = {}
    for request, measured in zip(asked, measure(args, asked), strict=True):
        groups.setdefault(request["group"], []).append(summary(request, measured))
    if args.size == "full":
        groups["growth"] = grown(groups["cells"], "m", args.peers) + grown(groups["partitions"], "n", args.peers)
    about = {"device": args.device, "rounds": args.rounds, "turns": args.turns}
    command.finish(unit="us per cell; deep: ms", **about, **groups)


if __name__ == "__main__":
    main()
