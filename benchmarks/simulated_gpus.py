"""Pipelines on simulated GPUs: how much of the ideal time of a program the host lets a machine of several GPUs reach.

The devices are those of `tests/late` on its clock: kernels take a time from their FLOP and bytes, copies from the
bandwidth of a link, and nothing is computed. The host is real: Python, the lock of the interpreter, launches and their
order. Its time is what the process has computed, so that other programs do not count.

The ideal is the program of the schedule, simulated on paper with the device time of a forward and a backward of one
block and of a copy. A partition is one block. Every figure is simulated.

    python -m benchmarks.simulated_gpus                  # about ten minutes; needs a C++ compiler
    python -m benchmarks.simulated_gpus --only blocks    # one part; parts that were measured before stay
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import process_time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.program import Part, Program, Progress
from benchmarks.records import aim, aims_table, shown, spread, table
from benchmarks.schedules import stepping
from torchgpipe.schedule import NAMES, program, simulate
from torchgpipe.schedule.programs import usual_places

__all__ = ["simulated_blocks", "simulated_cards", "simulated_devices"]

Row = dict[str, Any]

#: What such cards reach in practice: products of matrices in bfloat16, memory, and the link between two of them.
CARDS = {
    "A100-like": {"flops": 200e12, "bandwidth": 1.4e12, "link": 200e9},
    "consumer": {"flops": 80e12, "bandwidth": 0.8e12, "link": 20e9},
}

#: Tokens of a sequence; a micro-batch has as many sequences as make a block take its time.
TOKENS = 128

#: Milliseconds of a block's forward, and the least share of the ideal for eight devices.
AIMS = {1.0: 0.85, 5.0: 0.95}

#: The most that `pipelined` may take longer than GPipe.
BESIDE = 1.05

WAYS = ("forward", "step", "pipelined")


class GPTBlock(nn.Module):
    """Causal attention and a feedforward network, each behind a norm and beside a residual."""

    width, heads = 2048, 16

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(self.width), nn.LayerNorm(self.width)
        self.qkv, self.out = nn.Linear(self.width, 3 * self.width), nn.Linear(self.width, self.width)
        self.up, self.down = nn.Linear(self.width, 4 * self.width), nn.Linear(4 * self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MLPBlock(nn.Module):
    """Two linear layers beside a residual."""

    width = 2048

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(self.width, 4 * self.width), nn.Linear(4 * self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


BLOCKS: dict[str, type[nn.Module]] = {"GPT": GPTBlock, "MLP": MLPBlock}


def block(kind: str) -> nn.Module:
    with torch.device("late:0"):
        return BLOCKS[kind]().to(torch.bfloat16)


def inputs(rows: int) -> Tensor:
    return torch.empty(rows, TOKENS, GPTBlock.width, device="late:0", dtype=torch.bfloat16)


# ---- The ideal.


class Costs(NamedTuple):
    """The device time of each action of a block, in seconds, and of a copy of its output; sequences of a micro-batch;
    and the host time of a forward and a backward without a pipeline.
    """

    actions: dict[str, float]
    copy: float
    rows: int
    host: float


def kernels(run: Callable[[], object]) -> float:
    """Return the time that the device computes."""
    from tests import late

    late.intervals()
    run()
    return sum(one.end - one.start for one in late.intervals() if one.kind == "kernel")


def costs_of(kind: str, milliseconds: float, card: dict[str, float]) -> Costs:
    """Return the costs of a block whose forward takes about so long, with gradients that are added up."""
    layer = block(kind)
    with torch.no_grad():
        rows = max(1, round(64 * milliseconds * 1e-3 / kernels(lambda: layer(inputs(64)))))
    x = inputs(rows).requires_grad_()
    parameters = list(layer.parameters())
    layer(x).mean().backward()  # From now on gradients are added up; that of the input is not kept.
    x.grad = None
    output = layer(x)
    grad = torch.empty_like(output)
    actions = {
        "F": kernels(lambda: layer(x)),
        "I": kernels(lambda: torch.autograd.grad(output, x, grad, retain_graph=True)),
        "W": kernels(lambda: torch.autograd.backward(output, grad, retain_graph=True, inputs=parameters)),
        "B": kernels(lambda: output.backward(grad)),
    }
    host = []
    for _ in range(30):
        start = process_time()
        layer(x).backward(grad)
        host.append(process_time() - start)
    # What W computes again of I is not computed again in a program.
    actions["W"] = max(0.0, actions["B"] - actions["I"])
    return Costs(actions, 1e-5 + output.nbytes / card["link"], rows, min(host))


# ---- What runs.


def stepping_on(kind: str, way: str, schedule: Any, n: int, m: int) -> tuple[Callable[[Tensor], object], list[int]]:
    """Return a function that trains a mini-batch, and the devices of the partitions."""
    places = usual_places(schedule, n)
    devices = [f"late:{place}" for place in places]
    sample = inputs(1) if way == "pipelined" else None
    return stepping([block(kind) for _ in places], devices, schedule, m, sample=sample, calls=way == "forward"), places


def measured(kind: str, card: str, n: int, milliseconds: float, schedule: Any, way: str, turns: int) -> Row:
    """Return the row of one way to train."""
    from tests import late

    m = 4 * n
    with late.on_clock(late.Speed(**CARDS[card])):
        costs = costs_of(kind, milliseconds, CARDS[card])
        train, places = stepping_on(kind, way, schedule, n, m)
        x = inputs(m * costs.rows)
        # In backward as well, the first partition takes as long as others.
        x.requires_grad_()
        for _ in range(2):
            train(x)
        found = []
        for _ in range(turns):
            x.grad = None
            for device in range(n):
                torch.accelerator.synchronize(device)
            late.intervals()
            start, host = late.now(), process_time()
            train(x)
            host = process_time() - host
            for device in range(n):
                torch.accelerator.synchronize(device)
            found.append(outcome(late.intervals(), start, host, n))
    ideal = simulate(program(schedule, m, places), costs.actions, transfer=costs.copy)
    cells = m * len(places)
    of_cell = costs.actions["F"] + costs.actions["B"]
    return {
        "card": card,
        "model": kind,
        "n": n,
        "m": m,
        "schedule": schedule,
        "way": way,
        "block": costs.actions["F"],
        "ideal": ideal.seconds,
        "ideal bubble": ideal.bubble,
        "seconds": spread(one["seconds"] for one in found),
        "share": spread(ideal.seconds / one["seconds"] for one in found),
        "bubble": statistics.median(one["bubble"] for one in found),
        "in the shadow": statistics.median(one["in the shadow"] for one in found),
        "host of a cell": spread(one["host"] / cells for one in found),
        "host of a plain cell": costs.host,
        "device of a cell": of_cell,
        # One host launches for all devices.
        "host over devices": spread(one["host"] / cells * n / of_cell for one in found),
    }


def outcome(intervals: Sequence[Any], start: float, host: float, n: int) -> Row:
    """Return what a step took, and for which share of the time of copies the device that sends computes."""
    busy = [Busy([one for one in intervals if one.device == k and one.kind == "kernel"]) for k in range(n)]
    copies = [one for one in intervals if one.kind == "copy"]
    seconds = max(one.end for one in intervals) - start
    covered = sum(busy[one.device].until(one.end) - busy[one.device].until(one.start) for one in copies)
    copied = sum(one.end - one.start for one in copies)
    return {
        "seconds": seconds,
        "host": host,
        "bubble": 1 - sum(own.until(math.inf) for own in busy) / (n * seconds),
        "in the shadow": covered / copied if copied else 1.0,
    }


class Busy:
    """How long a device has computed until a time."""

    def __init__(self, kernels: Sequence[Any]) -> None:
        kernels = sorted(kernels, key=lambda one: one.start)
        self._starts = [one.start for one in kernels]
        self._lengths = [one.end - one.start for one in kernels]
        self._before = [0.0, *accumulate(self._lengths)]

    def until(self, time: float) -> float:
        k = bisect_right(self._starts, time)
        return self._before[k - 1] + min(self._lengths[k - 1], time - self._starts[k - 1]) if k else 0.0


# ---- The parts.


def devices(args: argparse.Namespace) -> Row:
    """Measure every schedule and way on each number of devices, with blocks of the sizes of the aims."""
    some = [(n, ms, schedule, way) for n in args.partitions for ms in AIMS for way in WAYS for schedule in NAMES]
    some = [one for one in some if one[3] != "forward" or one[2] == "GPipe"]
    progress = Progress(len(some))
    rows = []
    for n, ms, schedule, way in some:
        progress(f"GPT, A100-like, {n} devices, blocks of {ms} ms, {schedule}, {way}")
        rows.append(measured("GPT", "A100-like", n, ms, schedule, way, args.turns))
    return {"rows": rows, "aims": aims(rows)}


def blocks(args: argparse.Namespace) -> Row:
    """Measure blocks of many sizes on the most devices: from which size on is the host no longer the limit?"""
    some = [(ms, schedule) for ms in args.milliseconds for schedule in args.schedules]
    progress = Progress(len(some))
    rows = []
    for ms, schedule in some:
        progress(f"GPT, A100-like, blocks of {ms} ms, {schedule}")
        rows.append(measured("GPT", "A100-like", max(args.partitions), ms, schedule, "step", args.turns))
    return {"rows": rows}


def cards(args: argparse.Namespace) -> Row:
    """Measure both cards and models on the most devices."""
    some = [(card, kind, ms, way) for card in CARDS for kind in BLOCKS for ms in AIMS for way in WAYS]
    progress = Progress(len(some))
    rows = []
    for card, kind, ms, way in some:
        progress(f"{kind}, {card}, blocks of {ms} ms, {way}")
        schedule = "GPipe" if way == "forward" else "1F1B"
        rows.append(measured(kind, card, max(args.partitions), ms, schedule, way, args.turns))
    return {"rows": rows}


def aims(rows: Sequence[Row]) -> list[Row]:
    """Return what was aimed at: the lowest share of the ideal, and the most that `pipelined` takes over GPipe."""
    found = []
    most = max(row["n"] for row in rows)
    own = [row for row in rows if row["n"] == most]
    for ms, bound in AIMS.items():
        for way in WAYS:
            some = [row for row in own if row["way"] == way and near(row["block"], ms)]
            if some:
                reached = min(row["share"]["median"] for row in some)
                what = f"simulated: share of the ideal, {most} devices, blocks of {ms:g} ms, lowest of {way}"
                found.append(aim(what, reached, least=bound))
        pairs = [
            row["seconds"]["median"] / other["seconds"]["median"]
            for row in own
            for other in own
            if (row["way"], other["way"]) == ("pipelined", "step")
            and row["schedule"] == other["schedule"]
            and near(row["block"], ms)
            and near(other["block"], ms)
        ]
        if pairs:
            what = f"simulated: pipelined over GPipe, {most} devices, blocks of {ms:g} ms, highest schedule"
            found.append(aim(what, max(pairs), most=BESIDE))
    return found


def near(seconds: float, milliseconds: float) -> bool:
    return 0.7 < seconds * 1e3 / milliseconds < 1.4


# ---- Tables of a result.


def simulated_devices(result: Row) -> str:
    """Return a table of the shares of the ideal, by the number of devices, the size of a block and the schedule."""
    lines = []
    by_key: dict[Any, dict[str, Row]] = {}
    for row in result["rows"]:
        by_key.setdefault((row["n"], f"{row['block'] * 1e3:.1f}", row["schedule"]), {})[row["way"]] = row
    for (n, ms, schedule), own in by_key.items():
        step = own["step"]
        bubble = f"{step['ideal bubble']:.0%} / {step['bubble']:.0%}"
        shares = [shown(own[way]["share"] if way in own else None, 2) for way in WAYS]
        lines.append([n, ms, schedule, *shares, bubble, f"{step['in the shadow']:.0%}"])
    header = ["devices", "block, ms", "schedule", *WAYS, "bubble, ideal / step", "copied in the shadow"]
    return table(lines, header)


def _of_cells(result: Row, *first: str) -> str:
    lines = [
        [
            *[row[key] for key in first],
            f"{row['block'] * 1e3:.2f}",
            row["schedule"],
            row["way"],
            shown(row["share"], 2),
            shown({key: value * 1e3 for key, value in row["host of a cell"].items()}, 2),
            f"{row['host of a plain cell'] * 1e3:.2f}",
            f"{row['device of a cell'] * 1e3:.2f}",
            shown(row["host over devices"], 2),
        ]
        for row in result["rows"]
    ]
    figures = ["share of the ideal", "host of a cell, ms", "plain, ms", "device, ms", "host / devices"]
    return table(lines, [*first, "block, ms", "schedule", "way", *figures])


def simulated_blocks(result: Row) -> str:
    """Return a table of blocks of many sizes."""
    return _of_cells(result)


def simulated_cards(result: Row) -> str:
    """Return a table of both cards and models."""
    return _of_cells(result, "card", "model")


def showing(
    measure: Callable[[argparse.Namespace], Row], title: str, tabled: Callable[[Row], str]
) -> tuple[Callable[[argparse.Namespace], Row], Callable[[Row], dict[str, str]]]:
    """Return what measures a part, and what shows it."""
    return (
        lambda args: {"unit": "seconds, simulated", "cards": CARDS, **measure(args)},
        lambda result: {
            title: tabled(result),
            **({"what was aimed at": aims_table(result)} if "aims" in result else {}),
        },
    )


PARTS = {
    "devices": Part("simulated_gpus/devices", *showing(devices, "simulated: share of the ideal", simulated_devices)),
    "blocks": Part("simulated_gpus/blocks", *showing(blocks, "simulated: sizes of a block", simulated_blocks)),
    "cards": Part("simulated_gpus/cards", *showing(cards, "simulated: cards and models", simulated_cards)),
}


def begin(args: argparse.Namespace) -> None:
    """Load the simulated devices."""
    torch.set_num_threads(1)
    os.environ.setdefault("LATE_DEVICES", str(max(args.partitions)))
    from tests import late

    late.load()


def main() -> None:
    command = Program("simulated_gpus", __doc__, PARTS, PARTS)
    command.add("--partitions", nargs="+", type=int, default=[1, 2, 4, 8])
    command.add("--milliseconds", nargs="+", type=float, default=[0.25, 0.5, 1.0, 2.0, 5.0, 10.0])
    command.add("--schedules", nargs="+", choices=NAMES, default=["GPipe", "1F1B", "ZeroBubble"])
    command.add("--turns", type=int, default=3)
    command.run(begin)


if __name__ == "__main__":
    main()
