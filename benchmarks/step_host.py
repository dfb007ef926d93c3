"""Host time of a cell in a step, beside forward and backward of the same pipeline; and the child that takes it.

Layers and times are those of `tiny_steps.py`. A turn asks for a step, for `loss_fn(model(x)).backward()` of the same
pipeline in the same checkpoint mode, and for forward and backward of the plain layers, micro-batch by micro-batch, one
after the other as many times, and takes the lowest of each. The plain layers compute in the order of a step, without
recomputation: a backward pass for each micro-batch takes longer than one for all of them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.cost import MODES
from benchmarks.peers import Answer, Request, running, serve
from benchmarks.placement import threaded
from benchmarks.program import Progress
from benchmarks.records import of_part, ratios, shown, spread, table
from benchmarks.tiny_steps import lowest, tiny_layers, tiny_shape
from benchmarks.training import synchronize

__all__ = ["host", "step_host"]

#: The most times that a step takes of forward and backward.
AIMS = {"inline": 1.5, "workers": 1.2}
SCHEDULES = ("GPipe", "1F1B")


def mean(output: Tensor, _target: Any) -> Tensor:
    return output.mean()


def answer(peer: str, request: Request) -> Answer:
    """Return microseconds per cell: the lowest of all steps."""
    from torchgpipe import GPipe

    devices, m, n = request["devices"], request["m"], request["n"]
    layers = tiny_layers(n, request["parameters"])
    model = GPipe(
        layers,
        [1] * n,
        devices=devices,
        chunks=m,
        checkpoint=request["mode"],
        schedule=request["schedule"],
        loss_fn=mean,
    )
    x = torch.randn(tiny_shape(request)).to(devices[0])

    def call() -> None:
        torch.autograd.backward(mean(model(x), None))

    def step() -> None:
        model.step(x)

    def plain() -> None:
        for part in x.chunk(m):
            torch.autograd.backward(mean(layers(part), None) / m)

    runs = {"call": call, "step": step}
    if len({torch.device(device).type for device in devices}) == 1:
        runs["plain"] = plain

    def start() -> None:
        model.zero_grad(set_to_none=True)
        synchronize(devices)

    return {name: own / (m * n) * 1e6 for name, own in lowest(runs, request["steps"], start).items()}


# ---- The rows of the result.


def host(args: argparse.Namespace) -> dict[str, Any]:
    """Measure cells of 2 and of 12 parameters in every mode, inline and with workers."""
    n, m = args.tiny
    asked = [
        {"threads": threads, "schedule": schedule, "mode": mode, "parameters": parameters, "n": n, "m": m}
        for threads in AIMS
        for schedule in SCHEDULES
        for parameters in (2, 12)
        for mode in MODES
    ]
    turns: list[list[Answer]] = [[] for _ in asked]
    progress = Progress(args.turns)
    for turn in range(args.turns):
        if turn and args.seconds.spent():
            break
        progress("host time, in a fresh process")
        with running(["ours"], "step_host.py") as peers:
            for request, answers in zip(asked, turns):
                devices = threaded("ours", request["threads"], n, args.device)
                steps = max(2, 10 * args.steps // request["parameters"])
                answers.append(peers["ours"].ask({**request, "devices": devices, "steps": steps}))
    rows = []
    for request, answers in zip(asked, turns):
        times = {name: [turn[name] for turn in answers] for name in answers[0]}
        found = {name: {**spread(own), "turns": own} for name, own in times.items()}
        rows.append({**request, **found, "step/call": ratios(times["call"], times["step"])})
    return {"unit": "us per cell", "rows": rows, "aims": aims(rows)}


def aims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for threads, limit in AIMS.items():
        highest = max(row["step/call"]["median"] for row in rows if row["threads"] == threads)
        what = f"host time, step / forward and backward, {threads}, highest row"
        found.append({"aim": what, "at most": limit, "reached": highest, "met": highest <= limit})
    return found


def step_host(result: dict[str, Any]) -> str:
    """Return a table of the host time of a cell."""
    lines = [
        [
            *(row[key] for key in ("threads", "schedule", "parameters", "mode")),
            *(f"{row[name]['median']:.0f}" if name in row else "-" for name in ("plain", "call", "step")),
            shown(row["step/call"], 2),
        ]
        for row in of_part(result, "host")
    ]
    header = [
        "threads",
        "schedule",
        "parameters",
        "checkpoint",
        "plain, us",
        "forward and backward, us",
        "step, us",
        "step/forward and backward",
    ]
    return table(lines, header) if lines else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(answer)
