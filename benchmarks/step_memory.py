"""The most activations that each device keeps during a step, and the child that counts their bytes.

Layers count what autograd saves for backward: a hook wraps each saved tensor, and the bytes of its memory are alive
until the graph drops the wrapper. Tensors that share memory count once a device; parameters and the caller's mini-batch
do not count. A device runs its actions in one order, so its peak is the same in every step. Beside the devices' peaks
stands the most that PyTorch's allocator has handed out for all of them together (`allocations.py`). That figure has
everything in it, such as the gradients that wait between I and W, and depends on which threads are faster: given is the
highest of all steps.

The simulation gets the bytes that each partition saves of one micro-batch.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.allocations import reports
from benchmarks.peers import Answer, Request, running, serve
from benchmarks.program import Progress
from benchmarks.records import KIB, of_part, table
from torchgpipe import GPipe
from torchgpipe.schedule import NAMES, program, simulate
from torchgpipe.schedule.programs import usual_places
from torchgpipe_balancing.planning.peaks import HeldBytes

__all__ = ["counted", "in_kib", "memory", "step_memory"]

#: Layers of a device, their width, and the rows of a micro-batch: activations are many times larger than parameters.
LAYERS, WIDTH, ROWS = 4, 32, 512


class Saved:
    """A tensor that autograd saves."""

    def __init__(self, device: HeldBytes, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # With its graph, an output would keep the node that saves it alive.
        self._device = device
        device.hold(self.tensor)

    def __del__(self) -> None:
        self._device.drop(self.tensor)


class Counted(nn.Sequential):
    """Layers whose saved tensors are counted.

    Attributes:
        device: where they are counted
        given: a tensor of the caller, which does not count
    """

    device: HeldBytes
    given: Tensor

    def forward(self, input: Any) -> Any:
        own = {one.untyped_storage().data_ptr() for one in (self.given, *self.parameters())}

        def pack(tensor: Tensor) -> Tensor | Saved:
            return tensor if tensor.untyped_storage().data_ptr() in own else Saved(self.device, tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: getattr(kept, "tensor", kept)):
            return super().forward(input)


def layers(partitions: int, n: int) -> list[Counted]:
    """Return the partitions of a model whose ``n`` devices have the same layers in every schedule."""
    torch.manual_seed(0)
    each = LAYERS * n // partitions
    return [
        Counted(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(each)]) for _ in range(partitions)
    ]


def saved_by(partitions: list[Counted], given: Tensor) -> list[int]:
    """Return the bytes that each partition saves of the micro-batch ``given``."""
    value = given
    for partition in partitions:
        partition.device, partition.given = HeldBytes(), given
        value = partition(value).detach().requires_grad_()
    return [partition.device.peak for partition in partitions]


def answer(peer: str, request: Request) -> Answer:
    n, m, schedule = request["n"], request["m"], request["schedule"]
    at = usual_places(schedule, n)
    parts = layers(len(at), n)
    x = torch.randn(m * ROWS, WIDTH)
    units = saved_by(parts, x[:ROWS])
    devices = [HeldBytes() for _ in range(n)]
    for part, k in zip(parts, at):
        part.device, part.given = devices[k], x
    model = GPipe(
        nn.Sequential(*parts),
        [1] * len(parts),
        devices=[f"{request['device']}:{k}" for k in at],
        chunks=m,
        checkpoint=request["mode"],
        schedule=schedule,
        loss_fn=lambda output, _: output.mean(),
    )
    simulated = simulate(program(schedule, m, at), memory=units).peaks
    return {**counted(lambda: model.step(x), devices, request["steps"]), "simulated": simulated}


def counted(step: Callable[[], object], devices: Sequence[HeldBytes], steps: int) -> Answer:
    """Return the bytes that devices hold at the peak of a step, and the most that the allocator has handed out."""
    step()  # What is made once and kept is made here, gradients among it.
    saved, together = [], []
    for _ in range(steps):
        gc.collect()
        for device in devices:
            device.peak = 0
        together.append(reports().peak(step))
        saved.append([device.peak for device in devices])
    return {
        "saved": saved[0],
        "same_each_step": all(one == saved[0] for one in saved),
        "allocated": max(together),
    }


# ---- The rows of the result.


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Count every schedule without checkpointing, and 'GPipe' with it, on four devices."""
    wanted = [*((schedule, "never") for schedule in NAMES), ("GPipe", "always")]
    rows = []
    progress = Progress(len(wanted))
    with running(["ours"], "step_memory.py") as peers:
        for schedule, mode in wanted:
            progress(f"activations, {schedule}, {mode}")
            shape = {"n": 4, "m": args.micro_batches, "schedule": schedule, "mode": mode, "device": "cpu"}
            rows.append({**shape, **peers["ours"].ask({**shape, "steps": args.steps})})
    return {"rows": rows, "aims": aims(rows)}


def aims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the aims with what was reached: ratios of the devices that keep the most."""
    kept = {row["schedule"]: row for row in rows if row["mode"] == "never"}
    most = {schedule: max(row["saved"]) for schedule, row in kept.items()}
    over = [a / b for row in kept.values() for a, b in zip(row["saved"], row["simulated"], strict=True)]
    reached = {
        "1F1B / GPipe, activations": (0.35, most["1F1B"] / most["GPipe"]),
        "ZeroBubble / 1F1B, activations": (1.5, most["ZeroBubble"] / most["1F1B"]),
        "activations / simulated, highest device of all schedules": (1.05, max(over)),
    }
    return [
        {"aim": what, "at most": limit, "reached": ratio, "met": ratio <= limit}
        for what, (limit, ratio) in reached.items()
    ]


def in_kib(*sizes: float) -> str:
    """Return sizes as the cell of a table."""
    return ", ".join(f"{size / KIB:.0f}" for size in sizes)


def step_memory(result: dict[str, Any]) -> str:
    """Return a table of the activations of each device."""
    rows = of_part(result, "memory")
    lines = [
        [
            row["schedule"],
            row["mode"],
            in_kib(*row["saved"]),
            in_kib(*row["simulated"]) if row["mode"] == "never" else "-",
            in_kib(row["allocated"]),
        ]
        for row in rows
    ]
    header = ["schedule", "checkpoint", "saved by each device, KiB", "simulated", "allocated by all, KiB"]
    return table(lines, header) if lines else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    reports()
    serve(answer)
