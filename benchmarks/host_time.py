"""Host time: what a pipeline itself takes, beside the plain layers, torchgpipe 0.0.7, and other ways.

A pipeline is worth its devices only if the host keeps them busy: host time that a cell takes beside its layers is
lost on every device that waits for it. So the layers here are so tiny that nearly all time is host time
(`tiny_steps.py`), and each peer runs in a process of its own (`peers.py`). They are asked in turn, the same number of
steps each. A turn's figure is its lowest step, because time above the lowest is the machine's; every figure shown is a
median over turns, and a ratio is taken within a turn.

    cells       forward and backward of a cell, beside torchgpipe 0.0.7 and the plain layers
    step        a cell of `GPipe.step`, beside forward and backward of the same pipeline
    pipelined   a micro-batch of a pipelined module: per call of a module, per operation between two, and its own
    timeline    what recording a timeline adds to a cell (`host_timeline.py`)
    proof       what the proof of a pipelined GPT-2 takes, and the memory of it (`host_proof.py`)

    python -m benchmarks.host_time                              # cells and step: a minute or two
    python -m benchmarks.host_time --only cells --size full     # and growth with cells and partitions
    python -m benchmarks.host_time --only pipelined timeline
    python -m benchmarks.host_time --device cuda:0              # layers on a GPU, and on it and the CPU in turn
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks import host_proof, host_timeline
from benchmarks.cost import MODES
from benchmarks.peers import PEERS, Answer, Request
from benchmarks.placement import threaded
from benchmarks.program import Part, Program, ask_in_turn
from benchmarks.records import PASSES, Row, aim, named_way, ratios, shown, spread, spread_of_turns, table, table_of

__all__ = ["PARTS"]
CHILD = "tiny_steps.py"
THREADS = ("inline", "workers")

# ---- Cells: forward and backward.

#: Parameters in a cell: a block of a transformer, and four of them with a Linear.
SEVERAL = (12, 50)
RATIOS = {"ratio": "original/ours", "ratio_cpu": "of CPU time"}
#: How often `modes` and `several` are asked in a turn.
REPEATED = 3


def cell(group: str, steps: int, n: int, m: int, mode: str, threads: str = "inline", **more: Any) -> Request:
    """Return a request for steps of m micro-batches through n layers, each a partition."""
    shape = {"n": n, "m": m, "mode": mode, "threads": threads, "balance": [1] * n}
    return {"group": group, "kind": "cells", **shape, "steps": max(3, 320 * steps // (n * m)), **more}


def requests(n: int, m: int, size: str, steps: int) -> list[Request]:
    """Return all that is measured in a turn; of `group` is the list of the result that it ends in."""
    asked = [cell("modes", steps, n, m, mode, threads) for threads in THREADS for mode in MODES]
    asked += [cell("several", 12 * steps // count, 4, 8, mode, parameters=count) for count in SEVERAL for mode in MODES]
    if size == "full":
        for mode in ("always", "never"):
            asked += [cell("cells", steps, 8, count, mode) for count in (8, 32, 128, 512)]
            asked += [cell("partitions", steps, count, 32, mode) for count in (2, 8, 32, 64)]
    return asked


def cells(args: argparse.Namespace) -> dict[str, Any]:
    asked = requests(*args.shape, args.size, args.steps)
    cases = [
        {
            name: (name, {**request, "devices": threaded(name, request["threads"], request["n"], args.device)})
            for name in args.peers
        }
        for request in asked
    ]
    repeat = [args.repeat if request["group"] in ("modes", "several") else 1 for request in asked]
    measured = ask_in_turn(cases, CHILD, args.turns, args.seconds.spent, fresh=True, repeat=repeat)
    groups: dict[str, Any] = {}
    for request, answers in zip(asked, measured, strict=True):
        groups.setdefault(request["group"], []).append(cell_row(request, answers))
    if args.size == "full":
        groups["growth"] = grown(groups["cells"], "m", args.peers) + grown(groups["partitions"], "n", args.peers)
    return {"unit": "us per cell", **groups}


def cell_row(request: Request, measured: dict[str, list[Answer]]) -> Row:
    """Return a row of the result: each peer's figures, turn by turn and as a spread, and the ratio original / ours."""
    row: Row = {key: request[key] for key in ("n", "m", "mode", "threads", "parameters") if key in request}
    for part in PASSES:
        of_part = row[part] = {
            name: spread_of_turns(answer[part] for answer in answers) for name, answers in measured.items()
        }
        for name, answers in measured.items():
            for more in ("cpu", "typical", "cpu_typical"):
                of_part[name][more] = spread_of_turns(answer[f"{part}_{more}"] for answer in answers)
        if "ours" in measured and "original" in measured:
            ours, original = of_part["ours"], of_part["original"]
            of_part["ratio"] = ratios(ours["turns"], original["turns"])
            of_part["ratio_cpu"] = ratios(ours["cpu"]["turns"], original["cpu"]["turns"])
    return row


def grown(rows: list[Row], axis: str, peers: list[str]) -> list[Row]:
    """Return, by mode and part, the largest size's CPU time per cell over the smallest's along one axis.

    CPU time, because sizes are measured minutes apart, and another process's load would look like growth.
    """
    growths = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        sweep = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row[axis])
        for part in PASSES:
            small, large = sweep[0][part], sweep[-1][part]
            figures = {name: ratios(small[name]["cpu"]["turns"], large[name]["cpu"]["turns"]) for name in peers}
            growths.append({"axis": axis, "mode": mode, "part": part, **figures})
    return growths


def host_time(result: dict[str, Any]) -> str:
    return _times(result["modes"], ["threads", "mode"], 1)


def several(result: dict[str, Any]) -> str:
    return _times(result["several"], ["parameters", "mode"], 0)


def _times(rows: list[Row], keys: Sequence[str], digits: int) -> str:
    peers = [name for name in PEERS if name in rows[0]["forward"]]
    compared = [key for key in RATIOS if key in rows[0]["forward"]]
    lines = [
        [*(row[key] for key in keys), part]
        + [f"{row[part][name]['median']:.{digits}f}" for name in peers]
        + [shown(row[part][key], 2) for key in compared]
        for row in rows
        for part in PASSES
    ]
    return table(lines, [*keys, "part", *(f"{name}, us" for name in peers), *(RATIOS[key] for key in compared)])


def host_time_by_mode(result: dict[str, Any]) -> str:
    """Return a table of forward and backward together, without workers."""
    rows = [row for row in result["modes"] if row["threads"] == "inline"]
    peers = [name for name in PEERS if name in rows[0]["forward"]]
    lines = [
        [f"`'{row['mode']}'`", *(f"{sum(row[part][peer]['median'] for part in PASSES):.0f}" for peer in peers)]
        for row in rows
    ]
    return table(lines, ["checkpoint", *peers])


def growth(result: dict[str, Any]) -> str:
    rows = result.get("growth", [])
    peers = [name for name in PEERS if rows and name in rows[0]]
    sweeps = {"m": "m = 8 to 512, n = 8", "n": "n = 2 to 64, m = 32"}
    columns: dict[str, Any] = {"from, to": lambda row: sweeps[row["axis"]], "mode": "mode", "part": "part"}
    return table_of(rows, {**columns, **{name: f"{name}:2" for name in peers}})


# ---- Cells of a step, beside forward and backward of the same pipeline in the same checkpoint mode.

#: The most times that a step takes of forward and backward.
STEP_AIMS = {"inline": 1.5, "workers": 1.2}
SCHEDULES = ("GPipe", "1F1B")


def in_turns(asked: list[Request], args: argparse.Namespace) -> list[list[Answer]]:
    """Return the answers of ours to each request, one a turn."""
    cases = [{"ours": ("ours", request)} for request in asked]
    return [answers["ours"] for answers in ask_in_turn(cases, CHILD, args.turns, args.seconds.spent, fresh=True)]


def figures(answers: list[Answer]) -> dict[str, Any]:
    """Return the spread of each figure of several turns."""
    return {name: spread_of_turns(turn[name] for turn in answers) for name in answers[0]}


def step(args: argparse.Namespace) -> dict[str, Any]:
    """Measure cells of 2 and of 12 parameters in every mode, inline and with workers."""
    n, m = args.shape
    asked = [
        {"threads": threads, "schedule": schedule, "mode": mode, "parameters": parameters, "n": n, "m": m}
        for threads in THREADS
        for schedule in SCHEDULES
        for parameters in (2, 12)
        for mode in MODES
    ]
    more = [
        {
            "kind": "step",
            "devices": threaded("ours", request["threads"], n, args.device),
            "steps": max(2, 10 * args.steps // request["parameters"]),
        }
        for request in asked
    ]
    turns = in_turns([{**request, **how} for request, how in zip(asked, more)], args)
    rows = [
        {
            **request,
            **(measured := figures(answers)),
            "step/call": ratios(measured["call"]["turns"], measured["step"]["turns"]),
        }
        for request, answers in zip(asked, turns)
    ]
    aims = [
        aim(
            f"host time, step / forward and backward, {threads}, highest row",
            max(row["step/call"]["median"] for row in rows if row["threads"] == threads),
            most=most,
        )
        for threads, most in STEP_AIMS.items()
    ]
    return {"unit": "us per cell", "rows": rows, "aims": aims}


def _median(key: str) -> Any:
    return lambda row: f"{row[key]['median']:.0f}" if key in row else "-"


def step_host(result: dict[str, Any]) -> str:
    """Return a table of the host time of a cell."""
    columns = {
        **{"threads": "threads", "schedule": "schedule", "parameters": "parameters", "checkpoint": "mode"},
        **{"plain, us": _median("plain"), "forward and backward, us": _median("call"), "step, us": _median("step")},
        "step/forward and backward": "step/call:2",
    }
    return table_of(result["rows"], columns)


# ---- Micro-batches of a pipelined module.
#
# For a micro-batch, a pipelined model takes longer than the plain one by
#
#     a + calls x c + operations x g
#
# with the calls of modules, and the operations between them (glue; free on one device). The slope over the number of
# layers gives c, the same with an operation around each layer gives g, and what is left is a: starting and ending a
# frame, crossing the boundary, starting backward twice, and a share of what a mini-batch costs once. What grows with
# the layers counts as a call's: that aliases take the place of parameters, for instance.

#: Microseconds beyond the plain model.
PIPELINED_AIMS = {"call": 15.0, "micro-batch": 300.0}
DEVICES = {"inline": ["cpu", "cpu"], "workers": ["cpu:0", "cpu:1"]}
WAYS = ("step", "call")


def pipelined(args: argparse.Namespace) -> dict[str, Any]:
    """Measure few layers, many, and many with an operation around each, on one device and with workers."""
    few, many = args.layers
    asked = [
        {"threads": threads, "layers": layers, "glue": glue, "m": args.shape[1]}
        for threads in DEVICES
        for layers, glue in ((few, False), (many, False), (few, True), (many, True))
    ]
    more = {"kind": "pipelined", "steps": 4 * args.steps}
    turns = in_turns([{**shape, **more, "devices": DEVICES[str(shape["threads"])]} for shape in asked], args)
    rows = [{**request, **figures(answers)} for request, answers in zip(asked, turns)]
    costs = [
        {"threads": threads, "way": way, **beyond(turns[4 * k : 4 * k + 4], way, few, many)}
        for k, threads in enumerate(DEVICES)
        for way in WAYS
    ]
    aims = [
        aim(
            f"host time of a {part} beyond the plain model, us, {threads}, the higher of step and call",
            max(row[part]["median"] for row in costs if row["threads"] == threads),
            most=most,
        )
        for threads in DEVICES
        for part, most in PIPELINED_AIMS.items()
    ]
    return {"unit": "us per micro-batch", "rows": rows, "costs": costs, "aims": aims}


def beyond(turns: list[list[Answer]], way: str, few: int, many: int) -> dict[str, Any]:
    """Return what a call, an operation of glue and a micro-batch cost beyond the plain model, in microseconds."""
    costs: dict[str, list[float]] = {"call": [], "glue": [], "micro-batch": []}
    for turn in zip(*turns):
        bare_few, bare_many, glued_few, glued_many = (answer[way] - answer["plain"] for answer in turn)
        call = (bare_many - bare_few) / (many - few)
        costs["call"].append(call)
        costs["glue"].append((glued_many - glued_few) / (many - few) - call)
        costs["micro-batch"].append(bare_few - few * call)
    return {part: spread(microseconds) for part, microseconds in costs.items()}


def pipelined_host(result: dict[str, Any]) -> str:
    """Return a table of what a call, an operation between two modules and a micro-batch cost."""
    columns = {"threads": "threads", "way": lambda row: named_way(row["way"]), "spine call, us": "call"}
    return table_of(result["costs"], {**columns, "glue operation, us": "glue", "micro-batch, us": "micro-batch"})


PARTS = {
    "cells": Part(
        "overhead",
        cells,
        {
            "us per cell": host_time,
            "us per cell without workers": host_time_by_mode,
            "us per cell of several parameters": several,
            "largest size's CPU time per cell over the smallest's": growth,
        },
    ),
    "step": Part("step:host", step, {"host time of a cell": step_host}),
    "pipelined": Part(
        "pipelined:host",
        pipelined,
        {"host time beyond the plain model": pipelined_host},
        cpu=True,
    ),
    "timeline": Part(
        "timeline",
        host_timeline.measure,
        {"what a timeline costs a cell, median of turns (lowest-highest turn)": host_timeline.timeline},
        host_timeline.notes,
    ),
    "proof": Part(
        "pipelined:proof", host_proof.measure, {"the proof of a pipelined model": host_proof.pipelined_proof}, cpu=True
    ),
}


def main() -> None:
    options: dict[str, Any] = {"sizes": ("small", "full"), "peers": PEERS, "device": True, "seconds": "turn"}
    program = Program("host_time", __doc__, PARTS, ("cells", "step"), **options)
    program.add("--shape", nargs=2, type=int, default=[8, 32], metavar=("N", "M"), help="partitions, micro-batches")
    program.add("--turns", type=int, default=4, help="of fresh processes")
    program.add("--repeat", type=int, default=REPEATED, help="how often each peer is asked for cells in a turn")
    program.add("--steps", type=int, default=5, help="of a turn, more or less")
    program.add("--layers", nargs=2, type=int, default=[4, 32], metavar=("FEW", "MANY"), help="of pipelined")
    program.add("--gpt2", type=int, default=12, metavar="BLOCKS", help="of the GPT-2 that is proved")
    program.run()


if __name__ == "__main__":
    main()
