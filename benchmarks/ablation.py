"""What each mechanism of the engine gains: a U-Net trained with none of them, then with one more at a time.

    dependency   the order of micro-batches at backward is fixed, and not the autograd engine's choice
    streams      copies have streams of their own, beside the computation
    portals      skips go straight to where they are needed, and not in tuples through every partition between

Nothing is patched: a pipeline is given its mechanisms, and the model without portals is the same layers handing on
tuples (`examples/unet.py`). For each there is the throughput, the peak of a step above what is there at rest, and a
timeline of one step, as `torchgpipe.record` has seen it; the pictures stand one above the other on one scale.

    python -m benchmarks.ablation                 # a small U-Net over four partitions, on the CPU
    python -m benchmarks.ablation --size paper    # U-Net on GPUs
    python -m benchmarks.ablation --size gpu --devices cuda:0 cpu cuda:0 --balance 3 1 4    # on one, with the CPU
    python -m benchmarks.ablation --draw          # only draws what was measured: results/ablation.svg

On the CPU streams gain nothing: its work is done when the call returns, so there is nothing to overlap.
Its devices are numbered, `cpu:0`, `cpu:1` and so on, have a thread each in forward, which take turns, and are made to
copy as GPUs do; backward runs in one thread, in the order that the engine takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.peers import CHECKOUT, Answer, Peer, Request, serve
from benchmarks.pictures import INK, new_figure, open_axes
from benchmarks.placement import placed
from benchmarks.program import Command, Progress
from benchmarks.records import MIB, ratios, shown, spread, table

PEERS = ("plain", "ours")


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


# ---- The child.


def wrapped(request: Request) -> tuple[nn.Module, Any]:
    """Return the model with the mechanisms of a request, and its input."""
    from torchgpipe import GPipe
    from torchgpipe.devices.stream import Stream, Streams

    if (examples := str(CHECKOUT / "examples")) not in sys.path:
        sys.path.append(examples)
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
    ways = Ways(*request["ways"])
    devices = request["devices"]
    torch.manual_seed(0)
    module = unet(task.depth, task.width)
    x = torch.rand(task.batch, 3, task.size, task.size).to(devices[0])
    if request["plain"]:
        return module.to(devices[0]), x

    from torchgpipe_balancing import balance_by_time

    rows = max(1, task.batch // task.chunks)
    balance = request["balance"] or balance_by_time(module, x[:rows], partitions=task.partitions, timeout=0.5)
    request["balance"] = balance
    layers = module if ways.portals else without_portals(module)
    model = GPipe(layers, balance, devices=devices, chunks=task.chunks)
    streams = Apart() if ways.streams else NoSideStreams()
    model._mechanisms = replace(model._mechanisms, streams=streams, dependency=ways.dependency)
    return model, x if ways.portals else (x,)


def loss_of(model: nn.Module, x: Any) -> Tensor:
    output = model(x)
    scores: Tensor = output if isinstance(output, Tensor) else output[0]
    return scores.square().mean()


def timed(model: nn.Module, x: Any, request: Request) -> Answer:
    """Return the seconds of each step."""
    from benchmarks.training import synchronize

    seconds = []
    for _ in range(request["warm_up"] + request["steps"]):
        model.zero_grad(set_to_none=True)
        synchronize(request["devices"])
        start = perf_counter()
        torch.autograd.backward(loss_of(model, x))
        synchronize(request["devices"])
        seconds.append(perf_counter() - start)
    return {"seconds": seconds[request["warm_up"] :], "balance": request["balance"]}


def recorded(model: nn.Module, x: Any, request: Request) -> Answer:
    """Return the shortest of several steps: kind, micro-batch, partition, start and end of each span."""
    from torchgpipe import record

    torch.autograd.backward(loss_of(model, x))
    with record(model) as timeline:
        for _ in range(request["steps"]):
            torch.autograd.backward(loss_of(model, x))
    steps = [timeline.of_step(step) for step in timeline.steps]
    spans = min(steps, key=lambda spans: max(span.end for span in spans) - min(span.start for span in spans))
    first = min(span.start for span in spans)
    return {
        "spans": [
            f"{span.kind} {span.micro_batch} {span.partition} {span.start - first:.6f} {span.end - first:.6f}"
            for span in spans
        ]
    }


def counted(model: nn.Module, x: Any, request: Request) -> Answer:
    """Return the peak of a step above the level at rest, in each memory."""
    from benchmarks.allocations import memories, peaks, reports

    own = memories(request["devices"])
    if own[0].type == "cpu":
        reports()
    torch.autograd.backward(loss_of(model, x))
    model.zero_grad(set_to_none=True)
    return {"peak": peaks(lambda: loss_of(model, x), own)}


def answer(peer: str, request: Request) -> Answer:
    model, x = wrapped(request)
    return {"time": timed, "record": recorded, "count": counted}[request["kind"]](model, x, request)


# ---- The parent.


def experiments(peers: list[str]) -> dict[str, Ways | None]:
    """Return the mechanisms of each experiment by its name; None for the plain model."""
    plain = {"plain, one device": None} if "plain" in peers else {}
    return {**plain, **({str(ways): ways for ways in WAYS} if "ours" in peers else {})}


def places(devices: list[str], n: int) -> list[str]:
    """Return the device of each partition. CPUs are numbered, so that each is a device of its own."""
    return [f"cpu:{j}" for j in range(n)] if devices == ["cpu"] else placed(devices, n)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    task = TASKS[args.size]
    planned = experiments(args.peers)
    balance: list[int] | None = args.balance
    progress = Progress(len(planned) * (args.turns + 2))

    def ask(peer: Peer, kind: str, name: str) -> Answer:
        progress(f"{name}: {kind}")
        ways = planned[name]
        devices = places(args.devices, 1 if ways is None else task.partitions)
        about = {"kind": kind, "task": task, "plain": ways is None, "ways": ways or WAYS[-1], "balance": balance}
        return peer.ask({**about, "devices": devices, "warm_up": 1, "steps": args.steps})

    rows = {name: {"experiment": name, **(ways._asdict() if ways else {})} for name, ways in planned.items()}
    seconds: dict[str, list[float]] = {name: [] for name in planned}
    with Peer("ours", "ablation.py") as peer:
        for turn in range(args.turns):
            if turn and args.seconds.spent():
                break
            for name in planned:
                told = ask(peer, "time", name)
                balance = balance or told["balance"]
                seconds[name].append(statistics.median(told["seconds"]))
        for name, row in rows.items():
            row["spans"] = ask(peer, "record", name)["spans"] if planned[name] else []
    with Peer("ours", "ablation.py") as peer:
        for name, row in rows.items():
            row["peak"] = ask(peer, "count", name)["peak"]
    first = seconds.get("none") or next(iter(seconds.values()))
    for name, row in rows.items():
        row["seconds"] = seconds[name]
        row["throughput"] = spread(task.batch / each for each in seconds[name])
        row["over none"] = ratios(seconds[name], first)
        row["balance"] = balance
    return list(rows.values())


# ---- The table and the picture of a result.


def ablation(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        peaks = ", ".join(f"{peak / MIB:.2f}" for peak in row["peak"])
        lines.append([row["experiment"], shown(row["throughput"]), shown(row["over none"], 2), peaks])
    return table(lines, ["switched on", "images/s", "over none", "peak of each memory, MiB"])


def show(result: dict[str, Any]) -> dict[str, str]:
    task = Task(**result["task"])
    about = f"U-Net over {task.partitions} partitions, mini-batches of {task.batch} in {task.chunks} micro-batches"
    notes = {result["note"]: ""} if result["note"] else {}
    return {f"{about}; median of turns (lowest-highest)": ablation(result), **notes}


def draw(result: dict[str, Any]) -> Any:
    """Draw the timelines of all experiments, one above the other on one scale."""
    rows = [row for row in result["rows"] if row["spans"]]
    if not rows:
        return None
    from matplotlib.patches import Patch, Rectangle

    colors = {
        "forward": "#56b4e9",
        "recomputation": "#f5d76e",
        "backward": "#009e73",
        "copy": "#cc79a7",
        "wait": "#c8c8c8",
    }
    n = result["task"]["partitions"]
    figure = new_figure(12, (0.28 * n + 0.75) * len(rows) + 0.6)
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True)[:, 0]
    longest = 0.0
    for axes, row in zip(panels, rows, strict=True):
        last = 0.0
        for span in row["spans"]:
            kind, _, j, start, end = span.split()
            top, height = (0.24, 0.2) if kind == "copy" else (-0.43, 0.62)
            corner, width = (1e3 * float(start), int(j) + top), 1e3 * (float(end) - float(start))
            axes.add_patch(Rectangle(corner, width, height, facecolor=colors[kind], edgecolor="white", linewidth=0.3))
            last = max(last, 1e3 * float(end))
        longest = max(longest, last)
        open_axes(axes, title=f"{row['experiment']}: {last:.1f} ms", ylim=(n - 0.5, -0.5), yticks=range(n))
        axes.axvline(last, color=INK, linewidth=1, linestyle=":")
        axes.grid(False)
    panels[-1].set(xlim=(0, 1.01 * longest), xlabel="ms since the step began")
    figure.supylabel("partition", fontsize=10)
    handles = [Patch(facecolor=color, label=kind) for kind, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(colors), frameon=False)
    return figure


def main() -> None:
    command = Command("ablation", __doc__, show=show, draw=draw, sizes=TASKS, peers=PEERS, devices=True, seconds="turn")
    command.add("--turns", type=int, default=3)
    command.add("--steps", type=int, default=3, help="in a turn, whose figure is their median")
    command.add("--balance", nargs="+", type=int, help="layers in each partition; by time, if not given")
    args = command.parse()
    about = {name: getattr(args, name) for name in ("size", "devices", "turns", "steps")}
    note = NOTE if args.devices == ["cpu"] else ""
    task = TASKS[args.size]._asdict()
    command.finish(unit="images/s, seconds, bytes", **about, task=task, note=note, rows=measure(args))


if __name__ == "__main__":
    if "BENCHMARK_PEER" in os.environ:
        torch.set_num_threads(1)
        serve(answer)
    else:
        main()
