"""`pipelined` with blocks that sleep, and what each device keeps, as `step_sleeping` and `step_memory` for `GPipe`.

The blocks are those of these two files, in a model that is no `nn.Sequential`. The way `call` is `model(...)` and
`loss.backward()`, all forward before all backward, and compared with the simulation of GPipe's schedule.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Answer, Request, running, serve
from benchmarks.program import Progress
from benchmarks.records import of_part, shown, table
from benchmarks.step_memory import ROWS, WIDTH, counted, in_kib, layers, reports, saved_by
from benchmarks.step_sleeping import Sleeping, beside, overlap
from torchgpipe.schedule import program, simulate
from torchgpipe_balancing.planning.peaks import HeldBytes

__all__ = ["memory", "pipelined_memory", "pipelined_sleeping", "sleeping"]

#: The ways of a step.
WAYS = ("1F1B", "GPipe", "call")

#: The most activations of 1F1B over those of GPipe.
KEPT = 0.35


class Blocks(nn.Module):
    """Blocks, called one after the other.

    Args:
        blocks: the blocks
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = block(input)
        return input


def stepping(blocks: list[Any], way: str, m: int, x: Tensor) -> Callable[[], object]:
    """Return a function that trains a mini-batch in a pipeline with a device for each block."""
    from torchgpipe import pipelined

    model: Any = Blocks(blocks)
    pipelined(
        model,
        (x[: len(x) // m],),
        chunks=m,
        devices=[f"cpu:{k}" for k in range(len(blocks))],
        balance={f"blocks.{k}": k for k in range(len(blocks))},
        schedule="GPipe" if way == "call" else way,
        loss_fn=lambda output, _: output.mean(),
        verify=False,  # what is saved is counted
    )
    return (lambda: torch.autograd.backward(model(x).mean())) if way == "call" else (lambda: model.step(x))


def order(way: str) -> Any:
    """Return the schedule that a way computes in."""
    return "GPipe" if way == "call" else way


# ---- Blocks that sleep.


def sleeping(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each way on each number of devices."""
    rows = []
    progress = Progress(len(args.partitions) * len(WAYS))
    for n in args.partitions:
        for way in WAYS:
            progress(f"sleeping blocks, {n} devices, {way}")
            rows.append(slept(way, n, args.sleeping, args.sleep, args.turns))
    return {"seconds of F, I and W on a device": args.sleep, "rows": rows, "aims": overlap(rows, "way", {})}


def slept(way: str, n: int, m: int, seconds: float, turns: int) -> dict[str, Any]:
    """Return the row of a way."""
    costs = {"F": seconds, "B": 2 * seconds, "I": seconds, "W": seconds}
    simulated = simulate(program(order(way), m, list(range(n))), costs)
    # With a gradient of the input, backward takes as long in the first partition as in the others.
    x = torch.zeros(2 * m, 1, requires_grad=True)
    step = stepping([Sleeping(seconds) for _ in range(n)], way, m, x)
    return {"way": way, "n": n, "m": m, **beside(simulated, step, turns)}


def pipelined_sleeping(result: dict[str, Any]) -> str:
    """Return a table of simulated and measured times of blocks that sleep."""
    lines = [
        [
            row["n"],
            _named(row["way"]),
            f"{row['simulated']:.3f}",
            shown(row["measured"], 3),
            shown(row["simulated/measured"], 3),
        ]
        for row in of_part(result, "sleeping")
    ]
    return table(lines, ["devices", "step", "simulated, s", "measured, s", "ratio"]) if lines else ""


# ---- Memory.


def answer(peer: str, request: Request) -> Answer:
    """Count what autograd saves on each device, and what the allocator hands out for all of them."""
    n, m, way = request["n"], request["m"], request["way"]
    blocks = layers(n, n)
    x = torch.randn(m * ROWS, WIDTH)
    units = saved_by(blocks, x[:ROWS])
    devices = [HeldBytes() for _ in range(n)]
    for block, device in zip(blocks, devices):
        block.device, block.given = device, x
    step = stepping(blocks, way, m, x)
    return {
        **counted(step, devices, request["steps"]),
        "simulated": simulate(program(order(way), m, list(range(n))), memory=units).peaks,
    }


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Count each way on four devices."""
    rows = []
    progress = Progress(len(WAYS))
    with running(["ours"], "pipelined_steps.py") as peers:
        for way in WAYS:
            progress(f"activations, {way}")
            shape = {"n": 4, "m": args.sleeping, "way": way}
            rows.append({**shape, **peers["ours"].ask({**shape, "steps": args.steps})})
    most = {row["way"]: max(row["saved"]) for row in rows}
    over = max(a / b for row in rows for a, b in zip(row["saved"], row["simulated"]))
    reached = {
        "1F1B / GPipe, activations": (KEPT, most["1F1B"] / most["GPipe"]),
        "activations / simulated, highest device of all ways": (1.05, over),
    }
    aims = [
        {"aim": what, "at most": limit, "reached": ratio, "met": ratio <= limit}
        for what, (limit, ratio) in reached.items()
    ]
    return {"rows": rows, "aims": aims}


def pipelined_memory(result: dict[str, Any]) -> str:
    """Return a table of the activations of each device."""
    lines = [
        [
            _named(row["way"]),
            in_kib(*row["saved"]),
            in_kib(*row["simulated"]),
            in_kib(row["allocated"]),
        ]
        for row in of_part(result, "memory")
    ]
    header = ["step", "saved by each device, KiB", "simulated", "allocated by all, KiB"]
    return table(lines, header) if lines else ""


def _named(way: str) -> str:
    return "forward and backward" if way == "call" else way


if __name__ == "__main__":
    torch.set_num_threads(1)
    reports()
    serve(answer)
