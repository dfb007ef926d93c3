"""What mechanisms of the engine gain, one by one; and what a deferred batch norm costs.

`engine`: a U-Net is trained with none of the mechanisms, then with one more at a time:

    dependency   the order of micro-batches at backward is fixed, and not the autograd engine's choice
    streams      copies have streams of their own, beside the computation
    portals      skips go straight to where they are needed, and not in tuples through every partition between

Nothing is patched: a pipeline is given its mechanisms, and the model without portals is the same layers handing on
tuples (`examples/unet.py`). For each there is the throughput, and the peak of a step above what is there at rest. On a
CPU streams gain nothing: its work is done when the call returns, so there is nothing to overlap. Its devices are
numbered, `cpu:0`, `cpu:1` and so on, have a thread each in forward, which take turns, and are made to copy as GPUs do;
backward runs in one thread, in the order that the engine takes.

`batchnorm`: the time of a deferred batch norm, ours and the original's, each beside a plain one on the same
micro-batches. Deferring the running statistics should cost next to nothing, because the kernel computes mean and
variance of a micro-batch anyway; the original computes them again, in passes over the data of its own. A mini-batch of
shape (32, 64, 56, 56) goes through the layer in m micro-batches, without a pipeline around it. Both layers of a process
run in pairs, plain then deferred, then the other way round, so that a pair sees the same load; a turn's ratio is the
median over its pairs.

    python -m benchmarks.mechanisms                   # engine: a small U-Net over four partitions, on the CPU
    python -m benchmarks.mechanisms --size paper      # U-Net on GPUs
    python -m benchmarks.mechanisms --size gpu --devices cuda:0 cpu cuda:0 --balance 3 1 4    # on one, with the CPU
    python -m benchmarks.mechanisms --only batchnorm  # three minutes
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.allocations import memories, peaks, reports
from benchmarks.peers import Answer, Case, Request, examples_on_path, running, serve
from benchmarks.placement import placed
from benchmarks.program import Part, Program, ask_in_turn
from benchmarks.records import MIB, PASSES, Row, ratios, shown, spread, table_of
from benchmarks.timing import timed

__all__ = ["PARTS"]
CHILD = "mechanisms.py"
PEERS = ("plain", "ours", "original")

# ---- The engine's mechanisms.


class Ways(NamedTuple):
    """Which mechanisms are on."""

    dependency: bool
    streams: bool
    portals: bool

    def __str__(self) -> str:
        return ", ".join(name for name, on in self._asdict().items() if on) or "none"


#: One after the other.
WAYS = [Ways(False, False, False), Ways(True, False, False), Ways(True, True, False), Ways(True, True, True)]


class Task(NamedTuple):
    """A U-Net and its images.

    Attributes:
        depth: how often the size of an image is halved
        width: channels at full size
        size: height and width of an image
        batch: the size of a mini-batch
        chunks: the micro-batches that it is split into
        partitions: of the pipeline
    """

    depth: int
    width: int
    size: int
    batch: int
    chunks: int
    partitions: int


TASKS = {
    "small": Task(3, 8, 32, 16, 8, 4),
    # Large images in few channels: copies between the GPU and the CPU weigh against what the CPU computes.
    "gpu": Task(3, 8, 256, 16, 8, 3),
    "paper": Task(5, 64, 192, 64, 32, 8),
}

NOTE = (
    "On the CPU work is done when the call returns: streams have nothing to overlap there, and change nothing. What "
    "the others change is the order of backward (dependency) and what is copied (portals)."
)


def wrapped(request: Request) -> tuple[nn.Module, Any]:
    """Return the model with the mechanisms of a request, and its input."""
    from torchgpipe import GPipe
    from torchgpipe.devices.stream import Stream, Streams

    examples_on_path()
    from unet import unet, without_portals

    class Apart(Streams):
        """Any two devices copy, also those that share the CPU's memory."""

        def moves(self, source: torch.device, target: torch.device) -> bool:
            return source != target

    class NoSideStreams(Apart):
        """Copies are launched where the computation is, and both wait for each other."""

        def side(self, device: torch.device, purpose: str) -> Stream:
            return self.current(device)

    task = Task(*request["task"])
    devices = request["devices"]
    torch.manual_seed(0)
    module = unet(task.depth, task.width)
    x = torch.rand(task.batch, 3, task.size, task.size).to(devices[0])
    if request["ways"] is None:
        return module.to(devices[0]), x
    ways = Ways(*request["ways"])
    layers = module if ways.portals else without_portals(module)
    model = GPipe(layers, request["balance"], devices=devices, chunks=task.chunks)
    streams = Apart() if ways.streams else NoSideStreams()
    model._mechanisms = replace(model._mechanisms, streams=streams, dependency=ways.dependency)
    return model, x if ways.portals else (x,)


def loss_of(model: nn.Module, x: Any) -> Tensor:
    output = model(x)
    scores: Tensor = output if isinstance(output, Tensor) else output[0]
    return scores.square().mean()


def timed_steps(request: Request) -> Answer:
    """Return the seconds of each step after the first one."""
    model, x = wrapped(request)

    def step() -> Tensor:
        loss = loss_of(model, x)
        torch.autograd.backward(loss)
        return loss.detach()

    return timed(step, model.zero_grad, request["devices"], {**request, "warm_up": 1})


def peak_of_a_step(request: Request) -> Answer:
    """Return the peak of a step above the level at rest, in each memory."""
    devices = memories(request["devices"])
    if devices[0].type == "cpu":
        reports()
    model, x = wrapped(request)
    torch.autograd.backward(loss_of(model, x))
    model.zero_grad(set_to_none=True)
    return {"peak": peaks(lambda: loss_of(model, x), devices)}


def by_time(request: Request) -> Answer:
    """Return a balance by time."""
    from torchgpipe_balancing import balance_by_time

    task = Task(*request["task"])
    module, x = wrapped({**request, "ways": None})
    sample = x[: max(1, task.batch // task.chunks)]
    return {"balance": balance_by_time(module, sample, partitions=task.partitions, timeout=0.5)}


def places(devices: list[str], n: int) -> list[str]:
    """Return the device of each partition. CPUs are numbered, so that each is a device of its own."""
    return [f"cpu:{j}" for j in range(n)] if devices == ["cpu"] else placed(devices, n)


def engine(args: argparse.Namespace) -> dict[str, Any]:
    task = TASKS[args.size]
    planned: dict[str, Ways | None] = {"plain, one device": None} if "plain" in args.peers else {}
    planned |= {str(ways): ways for ways in WAYS} if "ours" in args.peers else {}
    shape = {"task": task, "steps": args.steps, "balance": args.balance}
    with running(["ours"], CHILD) as peers:
        if not args.balance:
            whole = {**shape, "kind": "balance", "devices": args.devices[:1]}
            shape |= peers["ours"].ask(whole)
        case: Case = {
            name: ("ours", {**shape, "ways": ways, "devices": places(args.devices, task.partitions if ways else 1)})
            for name, ways in planned.items()
        }
        timed = {way: (peer, {**request, "kind": "time"}) for way, (peer, request) in case.items()}
        (answers,) = ask_in_turn([timed], peers, args.turns, args.seconds.spent)
    with running(["ours"], CHILD) as peers:
        peak = {name: peers["ours"].ask({**request, "kind": "peak"})["peak"] for name, (_, request) in case.items()}
    seconds = {name: [statistics.median(turn["seconds"]) for turn in turns] for name, turns in answers.items()}
    first = seconds.get("none") or next(iter(seconds.values()))
    rows = [
        {
            **{"experiment": name, **(ways._asdict() if ways else {}), "peak": peak[name], "seconds": seconds[name]},
            "throughput": spread(task.batch / of_turn for of_turn in seconds[name]),
            "over none": ratios(seconds[name], first),
            "balance": shape["balance"],
        }
        for name, ways in planned.items()
    ]
    note = NOTE if args.devices == ["cpu"] else ""
    return {"unit": "images/s, seconds, bytes", "task": task._asdict(), "note": note, "rows": rows}


def ablation(result: dict[str, Any]) -> str:
    columns = {
        **{"switched on": "experiment", "images/s": "throughput", "over none": "over none:2"},
        "peak of each memory, MiB": lambda row: ", ".join(f"{peak / MIB:.2f}" for peak in row["peak"]),
    }
    return table_of(result["rows"], columns)


# ---- Deferred batch norm.

SHAPE = (32, 64, 56, 56)
FIGURES = ("plain", "deferred", "ratio")
#: Pairs of a turn.
PAIRS = 15

#: The largest ratio of our time to a plain batch norm's in forward that is aimed at.
TARGET = 1.3


def timed_pair(request: Request) -> Answer:
    """Return the median milliseconds of both layers in each part, and the median ratio of pairs."""
    from torchgpipe.batchnorm import DeferredBatchNorm

    torch.manual_seed(0)
    m, grad = request["m"], request["grad"]
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(nn.BatchNorm2d(SHAPE[1]), chunks=m)
    layers = {"plain": nn.BatchNorm2d(SHAPE[1]), "deferred": deferred}
    micro_batches = [part.requires_grad_(grad) for part in torch.randn(SHAPE).chunk(m)]

    def timed(norm: nn.Module) -> dict[str, float]:
        start = perf_counter()
        outputs = [norm(part) for part in micro_batches]
        middle = perf_counter()
        if grad:
            torch.autograd.backward(outputs, outputs)
        return {"forward": (middle - start) * 1e3, "backward": (perf_counter() - middle) * 1e3}

    pairs: list[dict[str, dict[str, float]]] = []
    with torch.set_grad_enabled(grad):
        for k in range(-1, request["pairs"]):
            for norm in layers.values():
                norm.zero_grad(set_to_none=True)
            times = {name: timed(layers[name]) for name in list(layers)[:: 1 if k % 2 else -1]}
            if k >= 0:  # The first pair warms up.
                pairs.append(times)
    result: Answer = {}
    for part in parts(grad):
        for name in layers:
            result[f"{part} {name}"] = statistics.median(pair[name][part] for pair in pairs)
        result[f"{part} ratio"] = statistics.median(pair["deferred"][part] / pair["plain"][part] for pair in pairs)
    return result


def parts(grad: bool) -> tuple[str, ...]:
    return PASSES if grad else PASSES[:1]


def batch_norms(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each number of micro-batches and each part, with and without gradients."""
    names = [name for name in ("ours", "original") if name in args.peers]
    shapes: list[Row] = [{"m": m, "grad": grad} for grad in (True, False) for m in (1, 4, 8)]
    request = {"kind": "batchnorm", "pairs": args.pairs}
    cases: list[Case] = [{name: (name, {**request, **shape}) for name in names} for shape in shapes]
    measured = ask_in_turn(cases, CHILD, args.turns, args.seconds.spent, fresh=True)
    rows = [
        {**shape, "part": part}
        | {
            name: {figure: spread(turn[f"{part} {figure}"] for turn in turns) for figure in FIGURES}
            for name, turns in answers.items()
        }
        for shape, answers in zip(shapes, measured, strict=True)
        for part in parts(shape["grad"])
    ]
    return {"unit": "ms", "shape": SHAPE, "target": TARGET, "threads": 1, "pairs": args.pairs, "rows": rows}


def batchnorm(result: dict[str, Any]) -> str:
    columns: dict[str, Any] = {"micro-batches": "m"}
    columns |= {"mode": lambda row: "training" if row["grad"] else "no gradients", "part": "part"}
    for name in ("ours", "original"):
        if name in result["rows"][0]:
            columns[name] = lambda row, name=name: shown(row[name]["ratio"], 2)
    return table_of(result["rows"], columns)


def batch_norm_notes(result: dict[str, Any]) -> Iterator[str]:
    if "ours" in result["rows"][0]:
        worst = max(row["ours"]["ratio"]["median"] for row in result["rows"] if row["part"] == "forward")
        yield f"ours in forward: at most {worst:.2f} times plain (target: {TARGET})"


KINDS = {"time": timed_steps, "peak": peak_of_a_step, "balance": by_time, "batchnorm": timed_pair}


def answer(peer: str, request: Request) -> Answer:
    return KINDS[request["kind"]](request)


PARTS = {
    "engine": Part(
        "ablation", engine, {"U-Net, median of turns (lowest-highest)": ablation}, lambda result: [result["note"]]
    ),
    "batchnorm": Part(
        "batchnorm",
        batch_norms,
        {"deferred over plain, median of turns (lowest-highest)": batchnorm},
        batch_norm_notes,
    ),
}


def main() -> None:
    options: dict[str, Any] = {"sizes": TASKS, "peers": PEERS, "devices": True, "seconds": "turn"}
    program = Program("mechanisms", __doc__, PARTS, ("engine",), **options)
    program.add("--turns", type=int, default=3)
    program.add("--steps", type=int, default=3, help="in a turn of engine, whose figure is their median")
    program.add("--balance", nargs="+", type=int, help="layers in each partition; by time, if not given")
    program.add("--pairs", type=int, default=PAIRS, help="in a turn of batchnorm")
    program.run()


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        torch.set_num_threads(1)
        serve(answer)
    else:
        main()
