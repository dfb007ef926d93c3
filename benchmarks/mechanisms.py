"""What mechanisms of the engine gain, one by one.

A U-Net is trained with none of the mechanisms of torchgpipe's paper, then with one more at a time:

    dependency   the order of micro-batches at backward is fixed, and not the autograd engine's choice
    streams      copies have streams of their own, beside the computation
    portals      skips go straight to where they are needed, and not in tuples through every partition between

and with all of them in two ways more: without recomputation, and with deferred batch norms.

Nothing is patched: a pipeline is given its mechanisms, and the model without portals is the same layers handing on
tuples (`examples/unet.py`). For each there is the throughput, and the peak of a step above what is there at rest. On a
CPU streams gain nothing: its work is done when the call returns, so there is nothing to overlap. Its devices are
numbered, `cpu:0`, `cpu:1` and so on, have a thread each in forward, which take turns, and are made to copy as GPUs do;
backward runs in one thread, in the order that the engine takes.

The published ratios are of U-Net (5, 64) on four Tesla P40, by torchgpipe's own benchmark: 30.7 images a second without
any mechanism.

    python -m benchmarks.mechanisms                   # a small U-Net over four partitions, on the CPU: two minutes
    python -m benchmarks.mechanisms --size paper      # U-Net on GPUs
    python -m benchmarks.mechanisms --size gpu --devices cuda:0 cpu cuda:0 --balance 3 1 4    # on one, with the CPU
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.allocations import memories, peaks_of, reports
from benchmarks.peers import Answer, Case, Request, examples_on_path, running, serve
from benchmarks.placement import placed
from benchmarks.program import Part, Program, ask_in_turn
from benchmarks.records import MIB, ratios, spread, table_of
from benchmarks.timing import timed

__all__ = ["PARTS"]
CHILD = "mechanisms.py"
PEERS = ("plain", "ours")


class Ways(NamedTuple):
    """Which mechanisms are on.

    Attributes:
        published: the throughput over that without any, if it has been published
    """

    dependency: bool = True
    streams: bool = True
    portals: bool = True
    checkpoint: str = "except_last"
    deferred_batch_norm: bool = False
    published: float | None = None


WAYS = {
    "none": Ways(dependency=False, streams=False, portals=False, published=1.0),
    "dependency": Ways(streams=False, portals=False, published=41.306 / 30.662),
    "dependency, streams": Ways(portals=False, published=55.191 / 30.662),
    "dependency, streams, portals": Ways(published=58.477 / 30.662),
    "all, and no recomputation": Ways(checkpoint="never"),
    "all, and deferred batch norms": Ways(deferred_batch_norm=True),
}


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
    how: Any = {"checkpoint": ways.checkpoint, "deferred_batch_norm": ways.deferred_batch_norm}
    model = GPipe(layers, request["balance"], devices=devices, chunks=task.chunks, **how)
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
    return {"peak": peaks_of(lambda: torch.autograd.backward(loss_of(model, x)), devices)}


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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    task = TASKS[args.size]
    planned: dict[str, Ways | None] = {"plain, one device": None} if "plain" in args.peers else {}
    planned |= WAYS if "ours" in args.peers else {}
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
        "published": lambda row: f"{row['published']:.2f}" if row.get("published") else "-",
        "peak of each memory, MiB": lambda row: ", ".join(f"{peak / MIB:.2f}" for peak in row["peak"]),
    }
    return table_of(result["rows"], columns)


KINDS = {"time": timed_steps, "peak": peak_of_a_step, "balance": by_time}


def answer(peer: str, request: Request) -> Answer:
    return KINDS[request["kind"]](request)


PARTS = {
    "mechanisms": Part(
        "ablation", measure, {"U-Net, median of turns (lowest-highest)": ablation}, lambda result: [result["note"]]
    ),
}


def main() -> None:
    options: dict[str, Any] = {"sizes": TASKS, "peers": PEERS, "devices": True, "seconds": "turn"}
    program = Program("mechanisms", __doc__, PARTS, **options)
    program.add("--turns", type=int, default=3)
    program.add("--steps", type=int, default=3, help="in a turn, whose figure is their median")
    program.add("--balance", nargs="+", type=int, help="layers in each partition; by time, if not given")
    program.run()


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        torch.set_num_threads(1)
        serve(answer)
    else:
        main()
