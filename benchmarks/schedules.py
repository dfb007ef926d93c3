"""Schedules: what `torchgpipe.schedule` simulates, beside what happens, of `GPipe.step` and of pipelined modules.

    sleeping, pipelined_sleeping   layers that sleep, so that cores do not matter: simulated over measured time
    recomputed                     the same where all is recomputed, beside recomputation that waits for the gradient
    activations, pipelined_activations   what each device saves for backward at the peak, in bytes
    recorded                       a recorded step, for the picture of the README

The layers that sleep have one path to the input and one to the weight. Each path has an operation of PyTorch with a
hook that sleeps, so a backward that is split into I and W sleeps in two parts:

    input ──► * 1 ──┐            F sleeps in forward
                    + ──► output   I sleeps in a hook on the upper path
    weight ─► * 1 ──┘            W sleeps in a hook on the lower path; B in both

A function of Python could not be split. The simulation gets the seconds that the layers are told to sleep; waking up
late counts against the pipeline, and so does all time of the host.

Of activations a hook wraps each tensor that autograd saves, and the bytes of its memory are alive until the graph drops
the wrapper. Tensors that share memory count once a device; parameters and the caller's mini-batch do not. A device
runs its actions in one order, so its peak is the same in every step. Beside the devices' peaks stands the most that
PyTorch's allocator has handed out for all of them together (`allocations.py`), the highest of all steps: it has
everything in it, such as the gradients that wait between I and W, and depends on which threads are faster. The
simulation gets the bytes that each partition saves of one micro-batch.

The way `call` of a pipelined module is `model(...)` and `loss.backward()`, all forward before all backward, and is
compared with the simulation of GPipe's schedule.

    python -m benchmarks.schedules                  # sleeping, on 2, 4 and 8 devices: a minute or two
    python -m benchmarks.schedules --all
    python -m benchmarks.schedules --only recorded  # -> results/side_by_side.json, in a second; then docs/figures.py
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn

import torchgpipe
from benchmarks.allocations import reports
from benchmarks.peers import Answer, Request, running, serve
from benchmarks.program import Part, Program, Progress
from benchmarks.records import KIB, Row, aim, named_way, spread, table_of
from benchmarks.tiny_steps import Chain, mean
from tests.held import HeldBytes, Saved
from torchgpipe import GPipe, pipelined
from torchgpipe.schedule import NAMES, Action, Simulation, program, simulate
from torchgpipe.schedule.action import with_recomputation
from torchgpipe.schedule.programs import usual_places

__all__ = ["PARTS", "Sleeping"]
Step = Callable[[], object]

#: The ways of a step of a pipelined module.
WAYS = ("1F1B", "GPipe", "call")


class Sleeping(nn.Module):
    """A layer that sleeps as long in F as in I and in W, and twice as long in B.

    Args:
        seconds: of F
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, input: Tensor) -> Tensor:
        sleep(self.seconds)
        upper, lower = input * 1, self.weight * 1
        for path in (upper, lower):
            if path.requires_grad:  # Not so when a sample runs without a graph.
                path.register_hook(self._sleep)
        return upper + lower

    def _sleep(self, _grad: Tensor) -> None:
        sleep(self.seconds)


# ---- Steps: of a `GPipe`, and of a module that is no `nn.Sequential`.


def stepping(
    blocks: Sequence[nn.Module],
    devices: Sequence[str],
    schedule: Any,
    m: int,
    *,
    sample: Tensor | None = None,
    mode: Any = "never",
    calls: bool = False,
) -> Callable[[Tensor], object]:
    """Return what trains a mini-batch, with a partition for each block.

    Args:
        blocks: the blocks
        devices: the device of each
        schedule: the schedule
        m: the number of micro-batches
        sample: that of a module which is pipelined; None for a `GPipe`
        mode: what is recomputed
        calls: whether the mini-batch is a call and a backward, and no step
    """
    how: dict[str, Any] = {"devices": devices, "chunks": m, "schedule": schedule, "loss_fn": mean, "checkpoint": mode}
    model: Any
    if sample is None:
        model = GPipe(nn.Sequential(*blocks), [1] * len(blocks), **how)
    else:
        balance = {f"blocks.{k}": k for k in range(len(blocks))}
        # Without a proof, because what is saved is counted.
        model = pipelined(Chain(blocks), (sample,), balance=balance, verify=False, **how)
    return (lambda x: torch.autograd.backward(mean(model(x)))) if calls else model.step


def cpus(at: Sequence[int]) -> list[str]:
    return [f"cpu:{k}" for k in at]


def order(way: str) -> Any:
    """Return the schedule that a way computes in."""
    return "GPipe" if way == "call" else way


# ---- Layers that sleep.

#: The least of simulated / measured, by the number of devices; 0.95 for others.
SLEEPING_AIMS = {8: 0.9}


def sleeping(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every schedule on each number of devices. A device sleeps as long whatever the schedule."""

    def row(schedule: Any, n: int) -> Row:
        at = usual_places(schedule, n)
        seconds = args.sleep * n / len(at)
        # With a gradient of the input, I takes time in the first partition as well.
        x = torch.zeros(args.micro_batches, 1, requires_grad=True)
        step = stepping([Sleeping(seconds) for _ in at], cpus(at), schedule, args.micro_batches)
        return {"schedule": schedule, "n": n, **slept(schedule, at, seconds, partial(step, x), args)}

    return all_slept(args, NAMES, row, "schedule", SLEEPING_AIMS)


def recomputed(args: argparse.Namespace) -> dict[str, Any]:
    """Measure steps that recompute, and simulate them with recomputation before and behind the gradient's arrival."""
    seconds, m = args.sleep, args.micro_batches
    costs: dict[Any, float] = {"F": seconds, "B": 2 * seconds, "R": seconds}

    def row(schedule: str, n: int) -> Row:
        x = torch.zeros(m, 1, requires_grad=True)
        step = stepping([Sleeping(seconds) for _ in range(n)], cpus(range(n)), schedule, m, mode="always")
        measured = slept(schedule, range(n), seconds, partial(step, x), args)
        actions = with_recomputation(program(schedule, m, range(n)), [m] * n)
        again = {action[1:] for device in actions for action in device if action.kind == "R"}

        def behind(action: Action) -> float:
            return costs[action.kind] + seconds * (action.kind == "B" and action[1:] in again)

        early, late = simulate(actions, costs).seconds, simulate(program(schedule, m, range(n)), behind).seconds
        median = measured["measured"]["median"]
        figures = {
            "simulated": early,
            "simulated/measured": early / median,
            "behind": late,
            "behind/measured": late / median,
        }
        return {"schedule": schedule, "n": n, **measured, **figures}

    rows = [row(schedule, n) for n in args.partitions for schedule in ("GPipe", "1F1B")]
    return {"seconds of F, R and half a B": seconds, "rows": rows}


def recomputed_sleeping(result: dict[str, Any]) -> str:
    """Return a table of steps that recompute."""
    columns = {"devices": "n", "schedule": "schedule", "simulated, s": "simulated:.3f", "measured, s": "measured:3"}
    behind = {"behind the gradient, simulated, s": "behind:.3f", "over measured": "behind/measured:.2f"}
    return table_of(result["rows"], {**columns, **behind})


def sleeping_pipelined(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each way on each number of devices."""

    def row(way: str, n: int) -> Row:
        x = torch.zeros(2 * args.micro_batches, 1, requires_grad=True)
        blocks = [Sleeping(args.sleep) for _ in range(n)]
        how: dict[str, Any] = {"sample": x[:2], "calls": way == "call"}
        step = stepping(blocks, cpus(range(n)), order(way), args.micro_batches, **how)
        return {"way": way, "n": n, **slept(order(way), range(n), args.sleep, partial(step, x), args)}

    return all_slept(args, WAYS, row, "way", {})


def all_slept(
    args: argparse.Namespace,
    names: Sequence[Any],
    row: Callable[[Any, int], Row],
    kind: str,
    bounds: Mapping[int, float],
) -> dict[str, Any]:
    """Return the rows of each name on each number of devices, and the aims."""
    rows = []
    progress = Progress(len(args.partitions) * len(names))
    for n in args.partitions:
        for name in names:
            progress(f"layers that sleep, {n} devices, {name}")
            rows.append(row(name, n))
    aims = [
        aim(
            f"simulated / measured, {n} devices, lowest {kind}",
            min(row["simulated/measured"]["median"] for row in rows if row["n"] == n),
            least=bounds.get(n, 0.95),
        )
        for n in args.partitions
    ]
    return {"seconds of F, I and W on a device": args.sleep, "rows": rows, "aims": aims}


def slept(schedule: Any, at: Sequence[int], seconds: float, step: Step, args: argparse.Namespace) -> Row:
    """Return the seconds and the bubbles of a simulated step, and of steps that run; another one runs before them."""
    simulated = simulated_sleep(schedule, args.micro_batches, at, seconds)
    step()
    measured = []
    for _ in range(args.turns):
        start = perf_counter()
        step()
        measured.append(perf_counter() - start)
    return {
        "m": args.micro_batches,
        "simulated": simulated.seconds,
        "bubble": simulated.bubble,
        "measured": spread(measured),
        "measured bubble": 1 - statistics.fmean(simulated.busy) / statistics.median(measured),
        "simulated/measured": spread(simulated.seconds / seconds for seconds in measured),
    }


def simulated_sleep(schedule: Any, m: int, at: Sequence[int], seconds: float) -> Simulation:
    return simulate(program(schedule, m, at), {"F": seconds, "B": 2 * seconds, "I": seconds, "W": seconds})


def step_sleeping(result: dict[str, Any]) -> str:
    """Return a table of simulated and measured times of layers that sleep."""
    columns = {
        "devices": "n",
        "schedule": "schedule",
        **SLEPT,
        "bubble": "bubble:.1%",
        "measured": "measured bubble:.1%",
    }
    return table_of(result["rows"], columns)


def pipelined_sleeping(result: dict[str, Any]) -> str:
    """Return the same table of blocks of a pipelined module."""
    return table_of(result["rows"], {"devices": "n", "step": lambda row: named_way(row["way"]), **SLEPT})


SLEPT = {"simulated, s": "simulated:.3f", "measured, s": "measured:3", "ratio": "simulated/measured:3"}


# ---- Activations, counted in a child.

#: Layers of a device, their width, and the rows of a micro-batch: activations are many times larger than parameters.
LAYERS, WIDTH, ROWS = 4, 32, 512
DEVICES = 4


class Counted(nn.Sequential):
    """Layers whose saved tensors are counted.

    Attributes:
        device: where they are counted
        mini_batch: the caller's, which does not count
    """

    device: HeldBytes
    mini_batch: Tensor

    def forward(self, input: Any) -> Any:
        uncounted = {tensor.untyped_storage().data_ptr() for tensor in (self.mini_batch, *self.parameters())}

        def pack(tensor: Tensor) -> Saved:
            return Saved(tensor, None if tensor.untyped_storage().data_ptr() in uncounted else self.device)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            return super().forward(input)


def answer(peer: str, request: Request) -> Answer:
    """Return the bytes that devices save at the peak of a step, and the most that the allocator has handed out."""
    m, way, n = request["m"], request.get("way"), request["n"]
    schedule = request["schedule"] if way is None else order(way)
    at = list(range(n)) if way else usual_places(schedule, n)
    torch.manual_seed(0)
    count = LAYERS * n // len(at)
    layers = [Counted(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]) for _ in at]
    x = torch.randn(m * ROWS, WIDTH)
    units, value = [], x[:ROWS]
    for layer in layers:  # What each saves of a micro-batch.
        layer.device, layer.mini_batch = HeldBytes(), x
        value = layer(value).detach().requires_grad_()
        units.append(layer.device.peak)
    devices = [HeldBytes() for _ in range(n)]
    for layer, k in zip(layers, at):
        layer.device = devices[k]
    how: dict[str, Any] = {"sample": x[:ROWS], "calls": way == "call"} if way else {"mode": request["mode"]}
    step = partial(stepping(layers, cpus(at), schedule, m, **how), x)
    step()  # What is made once and kept is made here, gradients among it.
    saved, together = [], []
    for _ in range(request["steps"]):
        gc.collect()
        for device in devices:
            device.peak = 0
        together.append(reports().peak(step))
        saved.append([device.peak for device in devices])
    return {
        "saved": saved[0],
        "same_each_step": all(peaks == saved[0] for peaks in saved),
        "allocated": max(together),
        "simulated": simulate(program(schedule, m, at), memory=units).peaks,
    }


def activations(args: argparse.Namespace) -> dict[str, Any]:
    """Count every schedule without checkpointing, and 'GPipe' with it, on four devices."""
    wanted = [*({"schedule": schedule, "mode": "never"} for schedule in NAMES), {"schedule": "GPipe", "mode": "always"}]
    rows = all_counted(args, wanted)
    by_schedule = {row["schedule"]: row for row in rows if row["mode"] == "never"}
    split = most_saved(by_schedule["ZeroBubble"])
    aims = [
        *kept_aims(by_schedule, "schedules"),
        aim("ZeroBubble / 1F1B, activations", split / most_saved(by_schedule["1F1B"]), most=1.5),
    ]
    return {"rows": rows, "aims": aims}


def activations_pipelined(args: argparse.Namespace) -> dict[str, Any]:
    """Count each way on four devices."""
    rows = all_counted(args, [{"way": way} for way in WAYS])
    return {"rows": rows, "aims": kept_aims({row["way"]: row for row in rows}, "ways")}


def all_counted(args: argparse.Namespace, wanted: Sequence[Row]) -> list[Row]:
    rows = []
    progress = Progress(len(wanted))
    with running(["ours"], "schedules.py") as peers:
        for way in wanted:
            progress(f"activations, {', '.join(way.values())}")
            shape = {"n": DEVICES, "m": args.micro_batches, **way}
            rows.append({**shape, **peers["ours"].ask({**shape, "steps": args.steps})})
    return rows


def most_saved(row: Row) -> float:
    return float(max(row["saved"]))


def kept_aims(rows: Mapping[str, Row], kind: str) -> list[dict[str, Any]]:
    """Return the aims with what was reached: ratios of the devices that keep the most."""
    over = max(a / b for row in rows.values() for a, b in zip(row["saved"], row["simulated"], strict=True))
    return [
        aim("1F1B / GPipe, activations", most_saved(rows["1F1B"]) / most_saved(rows["GPipe"]), most=0.35),
        aim(f"activations / simulated, highest device of all {kind}", over, most=1.05),
    ]


def in_kib(*sizes: float) -> str:
    """Return sizes as the cell of a table."""
    return ", ".join(f"{size / KIB:.0f}" for size in sizes)


def step_memory(result: dict[str, Any]) -> str:
    """Return a table of the activations of each device."""
    return table_of(result["rows"], {"schedule": "schedule", "checkpoint": "mode", **SAVED})


def pipelined_memory(result: dict[str, Any]) -> str:
    """Return the same table of a pipelined module."""
    return table_of(result["rows"], {"step": lambda row: named_way(row["way"]), **SAVED})


SAVED: dict[str, Callable[[Row], str]] = {
    "saved by each device, KiB": lambda row: in_kib(*row["saved"]),
    "simulated": lambda row: in_kib(*row["simulated"]) if row.get("mode", "never") == "never" else "-",
    "allocated by all, KiB": lambda row: in_kib(row["allocated"]),
}


# ---- A recorded step: eight micro-batches pass eight blocks that sleep, on four devices under 1F1B.

MICRO_BATCHES = 8
KINDS = {"forward": "F", "backward": "B"}


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """Record the last of a few steps, with all time of the host between the cells."""
    seconds = args.sleep / 2
    x = torch.zeros(MICRO_BATCHES, 1, requires_grad=True)  # So that the first block has both paths of backward.
    blocks = nn.Sequential(*[Sleeping(seconds / 2) for _ in range(2 * DEVICES)])
    how: dict[str, Any] = {"chunks": MICRO_BATCHES, "checkpoint": "never", "loss_fn": mean}
    model = GPipe(blocks, [2] * DEVICES, devices=cpus(range(DEVICES)), **how)
    model.step(x)
    with torchgpipe.record(model, steps=1) as timeline:
        for _ in range(3):
            model.step(x)
    spans = [span for span in timeline.spans if span.computes]
    began = min(span.start for span in spans)
    return {
        "devices": DEVICES,
        "seconds of a block": seconds / 2,
        "simulated": simulated_sleep("1F1B", MICRO_BATCHES, range(DEVICES), seconds).seconds,
        "one device at a time": 3 * seconds * DEVICES * MICRO_BATCHES,
        "spans": [
            [span.partition, KINDS[span.kind], span.micro_batch, *(round(t - began, 6) for t in (span.start, span.end))]
            for span in spans
        ],
    }


def side_by_side(result: dict[str, Any]) -> str:
    """Return a table of the step: measured, simulated, and with one device at a time."""
    seconds = {"measured": max(end for *_, end in result["spans"])}
    seconds |= {name: result[name] for name in ("simulated", "one device at a time")}
    return table_of(seconds.items(), {"a step": lambda row: row[0], "time": lambda row: f"{row[1] * 1e3:.0f} ms"})


PARTS = {
    "recomputed": Part("step:recomputed", recomputed, {"layers that sleep and are recomputed": recomputed_sleeping}),
    "sleeping": Part("step:sleeping", sleeping, {"layers that sleep": step_sleeping}),
    "pipelined_sleeping": Part(
        "pipelined:sleeping", sleeping_pipelined, {"blocks of a pipelined module that sleep": pipelined_sleeping}
    ),
    "activations": Part("step:memory", activations, {"activations": step_memory}),
    "pipelined_activations": Part(
        "pipelined:memory", activations_pipelined, {"activations of a pipelined module": pipelined_memory}
    ),
    "recorded": Part("side_by_side", recorded, {"a step of blocks that sleep": side_by_side}),
}


def main() -> None:
    command = Program("schedules", __doc__, PARTS, ("sleeping",))
    command.add("--partitions", nargs="+", type=int, default=[2, 4, 8], help="n, the devices of layers that sleep")
    command.add("--micro-batches", type=int, default=16, help="m, of all but recorded")
    command.add("--sleep", type=float, default=0.04, help="seconds that a device sleeps in F, in I and in W")
    command.add("--turns", type=int, default=5)
    command.add("--steps", type=int, default=5, help="in a turn of activations")
    command.run()


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        torch.set_num_threads(1)
        reports()
        serve(answer)
    else:
        main()
