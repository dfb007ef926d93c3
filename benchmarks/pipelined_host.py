"""The host time of `pipelined` per call of a module of the spine and per micro-batch; and the child that takes it.

Layers are so small that all time is the host's. For a micro-batch, a pipelined model takes longer than the plain one by

    a + calls x c + operations x g

with the calls of modules of the spine, and the operations between them (*glue*; free on one device). The slope over the
number of layers gives c, the same with an operation around each layer gives g, and what is left is a: starting and
ending a frame, crossing the boundary, starting backward twice, and a share of what a mini-batch costs once. What grows
with the layers counts as a call's: that aliases take the place of parameters, for instance.

The plain model has a loss for each micro-batch, as a step has; forward and backward have one for all of them.

A turn asks for every way one after the other, as many times, and takes the lowest of each. `naive` and `export` compute
the mini-batch micro-batch by micro-batch, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import Answer, Request, running, serve
from benchmarks.pipelined_models import Glued, Tiny, place_naively, split_by_export
from benchmarks.program import Progress
from benchmarks.records import of_part, ratios, shown, spread, table
from benchmarks.tiny_steps import lowest

__all__ = ["host", "pipelined_host"]

#: Microseconds beyond the plain model.
AIMS = {"call": 15.0, "micro-batch": 300.0}
DEVICES = {"inline": ["cpu", "cpu"], "workers": ["cpu:0", "cpu:1"]}
ROWS = 2


def answer(peer: str, request: Request) -> Answer:
    """Return microseconds per micro-batch: the lowest of all steps."""
    from torchgpipe import pipelined

    m, count = request["m"], request["layers"]
    make = Glued if request["glue"] else Tiny
    x = torch.randn(m * ROWS, 4)

    def made() -> Tiny:
        torch.manual_seed(0)
        return make(count)

    def micro_batches(model: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for part in x.chunk(m):
                torch.autograd.backward(model(part).mean() / m)

        return run

    model: Any = pipelined(
        made(),
        (x[:ROWS],),
        chunks=m,
        devices=request["devices"],
        balance=[count // 2, count - count // 2],
        loss_fn=lambda output, _: output.mean(),
    )

    def call() -> None:
        torch.autograd.backward(model(x).mean())

    naive = made()
    place_naively(naive, {f"blocks.{k}": torch.device("cpu") for k in range(count)})
    runs = {"plain": micro_batches(made()), "naive": micro_batches(naive), "step": lambda: model.step(x), "call": call}
    if request["export"]:
        split = split_by_export(made(), x[:ROWS], {f"blocks.{count // 2}": 1})
        runs["export"] = micro_batches(lambda part: split(part)[0])  # It makes a tuple of the output.

    found = lowest(runs, request["steps"], start=lambda: None)
    return {name: own / m * 1e6 for name, own in found.items()}


# ---- The rows of the result.


def host(args: argparse.Namespace) -> dict[str, Any]:
    """Measure few layers, many, and many with an operation around each, on one device and with workers."""
    few, many = args.layers
    asked = [
        {"threads": threads, "layers": layers, "glue": glue, "m": args.micro_batches}
        for threads in DEVICES
        for layers, glue in ((few, False), (many, False), (few, True), (many, True))
    ]
    turns: list[list[Answer]] = [[] for _ in asked]
    progress = Progress(args.turns)
    for turn in range(args.turns):
        if turn and args.seconds.spent():
            break
        progress("host time, in a fresh process")
        with running(["ours"], "pipelined_host.py") as peers:
            for request, answers in zip(asked, turns):
                more = {"devices": DEVICES[request["threads"]], "steps": 4 * args.steps, "export": args.export}
                answers.append(peers["ours"].ask({**request, **more}))
    rows = []
    for request, answers in zip(asked, turns):
        times = {name: [turn[name] for turn in answers] for name in answers[0]}
        found = {name: {**spread(own), "turns": own} for name, own in times.items()}
        over = {f"{name}/plain": ratios(times["plain"], own) for name, own in times.items() if name != "plain"}
        rows.append({**request, **found, **over})
    costs = [
        {"threads": threads, "way": way, **parts(turns[4 * k : 4 * k + 4], way, few, many)}
        for k, threads in enumerate(DEVICES)
        for way in ("step", "call")
    ]
    return {"unit": "us per micro-batch", "rows": rows, "costs": costs, "aims": aims(costs)}


def parts(turns: list[list[Answer]], way: str, few: int, many: int) -> dict[str, Any]:
    """Return what a call, an operation of glue and a micro-batch cost beyond the plain model, in microseconds."""
    found: dict[str, list[float]] = {"call": [], "glue": [], "micro-batch": []}
    for bare_few, bare_many, glued_few, glued_many in zip(*turns):
        beyond = [one[way] - one["plain"] for one in (bare_few, bare_many, glued_few, glued_many)]
        call = (beyond[1] - beyond[0]) / (many - few)
        found["call"].append(call)
        found["glue"].append((beyond[3] - beyond[2]) / (many - few) - call)
        found["micro-batch"].append(beyond[0] - few * call)
    return {what: spread(own) for what, own in found.items()}


def aims(costs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for threads in DEVICES:
        for what, limit in AIMS.items():
            highest = max(row[what]["median"] for row in costs if row["threads"] == threads)
            aim = f"host time of a {what} beyond the plain model, us, {threads}, the higher of step and call"
            found.append({"aim": aim, "at most": limit, "reached": highest, "met": highest <= limit})
    return found


def pipelined_host(result: dict[str, Any]) -> str:
    """Return a table of what a call, an operation between two modules and a micro-batch cost."""
    names = {"step": "step", "call": "forward and backward"}
    lines = [
        [row["threads"], names[row["way"]], *(shown(row[what]) for what in ("call", "glue", "micro-batch"))]
        for row in of_part(result, "host", "costs")
    ]
    header = ["threads", "way", "spine call, us", "glue operation, us", "micro-batch, us"]
    return table(lines, header) if lines else ""


def pipelined_times(result: dict[str, Any]) -> str:
    """Return a table of the host time of a micro-batch, plain, placed naively, split by export, and pipelined."""
    names = ("plain", "naive", "export", "step", "call")
    lines = [
        [
            *(row[key] for key in ("threads", "layers")),
            "yes" if row["glue"] else "no",
            *(f"{row[name]['median']:.0f}" if name in row else "-" for name in names),
            *(shown(row[f"{name}/plain"], 2) for name in ("step", "call")),
        ]
        for row in of_part(result, "host")
    ]
    ways = ["plain, us", "naive, us", "export, us", "step, us", "forward and backward, us"]
    header = ["threads", "layers", "glue", *ways, "step / plain", "forward and backward / plain"]
    return table(lines, header) if lines else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
