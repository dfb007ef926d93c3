"""Weights in host memory on a simulated GPU: how much of their copies hides behind computing, and what the host takes.

The device is that of `tests/late` on its clock: kernels take a time from their FLOP and bytes, copies to and from the
host that of a link, and nothing is computed. The host is real. A partition is one block of GPT in bfloat16, with
recomputation, under 'LayerMajor' with two slots.

What should hide of the copies of weights up and gradients down follows from the program on paper, with the device times
of a block forward and backward and of an upload: all but the waits for uploads, and the last download. What does hide
is 1 - (time of the step - time that the device computes) / time of these copies: gaps of the host and waits for
activations count as copies that do not hide. Every figure is simulated.

    python -m benchmarks.offload                  # some minutes; needs a C++ compiler
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchgpipe
from benchmarks.models.gpt import Block
from benchmarks.program import Part, Program, Progress
from benchmarks.records import Row, aim, shown, spread, table_of
from benchmarks.tiny_steps import Chain, mean
from torchgpipe.front.pipelined import runs_of
from torchgpipe.schedule import Action, program
from torchgpipe.schedule.action import in_order
from torchgpipe.schedule.residency import residency

__all__ = ["PARTS", "Streamed", "streamed"]

#: What such a card reaches in practice: products of matrices in bfloat16, memory, and the link to the host.
CARD = {"flops": 165e12, "bandwidth": 0.9e12, "link": 25e9}
SLOTS = 2

#: The least share of the copies that hide, of those that should.
AIM = 0.9

#: Tokens of a sequence.
TOKENS = 128


class Streamed(NamedTuple):
    """A program whose weights come from host memory, run on paper.

    Attributes:
        seconds: the time from the start of the first upload to the end of the last action
        uploading: the seconds of all uploads
        waited: the seconds in which devices wait for nothing but an upload
    """

    seconds: float
    uploading: float
    waited: float


def streamed(
    program: Sequence[Sequence[Action]],
    slots: int | Sequence[int],
    cost: Callable[[Action], float],
    upload: Callable[[int], float],
) -> Streamed:
    """Run a program on paper, with the uploads of its weights, which follow each other on each device.

    Args:
        program: a list of actions for each device, which can run
        slots: as for `torchgpipe.schedule.residency`
        cost: the seconds of an action
        upload: the seconds in which the weights of a partition come
    """
    stays = [{stay.first: stay for stay in row} for row in residency(program, slots).weights]
    ends: dict[Action, float] = {}
    #: For each device, the ends of its actions; where an upload has room from the beginning, it starts at 0.
    ended: list[list[float]] = [[] for _ in program]
    arrived, uploading, waited = [0.0] * len(program), 0.0, 0.0
    for action, device, needed in in_order(program):
        start = max([0.0, *ended[device][-1:], *[ends[earlier] for earlier, _ in needed]])
        stay = stays[device].get(len(ended[device]))
        if stay is not None:
            room = ended[device][stay.after] if stay.after >= 0 else 0.0
            arrived[device] = max(arrived[device], room) + upload(stay.j)
            uploading += upload(stay.j)
            waited += max(0.0, arrived[device] - start)
            start = max(start, arrived[device])
        ends[action] = start + cost(action)
        ended[device].append(ends[action])
    return Streamed(max(ends.values(), default=0.0), uploading, waited)


class GPTBlock(Block):
    """Causal attention and a feedforward network, each behind a norm and beside a residual."""

    width, heads = 2048, 16

    def __init__(self) -> None:
        super().__init__(self.width, self.heads)


def inputs(rows: int, device: str = "late:0") -> Tensor:
    return torch.empty(rows, TOKENS, GPTBlock.width, device=device, dtype=torch.bfloat16)


def computed(intervals: Sequence[Any]) -> float:
    """Return the time that the device has computed."""
    return float(sum(interval.end - interval.start for interval in intervals if interval.kind == "kernel"))


def kernels(run: Callable[[], object]) -> float:
    """Return the time that the device computes in a call."""
    from tests import late

    late.intervals()
    run()
    return computed(late.intervals())


def pinned_block() -> nn.Module:
    """Return a block in pinned host memory, which nobody touches."""
    with torch.device("meta"):
        block = GPTBlock().to(torch.bfloat16)
    block.to_empty(device="cpu")
    for parameter in block.parameters():
        parameter.data = torch.empty_like(parameter, pin_memory=True)
    return block


def costs_of(rows: int) -> dict[str, float]:
    """Return the device time of a forward of a block, and of a backward with its recomputation, in seconds."""
    block = GPTBlock().to("late:0", torch.bfloat16)
    x = inputs(rows).requires_grad_()
    block(x).mean().backward()
    output = block(x)
    grad = torch.empty_like(output)
    forward = kernels(lambda: block(x))
    return {"F": forward, "B": forward + kernels(lambda: output.backward(grad))}


def measured(blocks: int, rows: int, chunks: int, turns: int) -> Row:
    """Return the row of a number of micro-batches of some sequences."""
    from tests import late
    from tests.offload.transfers import counted, transfers_of

    with late.on_clock(late.Speed(**CARD)):
        costs = costs_of(rows)
        host: dict[Any, float] = {}
        for offload in (False, "weights", True):
            plain = Chain([pinned_block() for _ in range(blocks)])
            options: Any = {"devices": ["late:0"] * blocks, "chunks": chunks, "loss_fn": mean, "verify": False}
            options |= {"checkpoint": True, "schedule": "LayerMajor", "balance": [1] * blocks}
            options |= {"offload": offload, "slots": SLOTS} if offload else {}
            model: Any = torchgpipe.pipelined(plain, (inputs(1, "cpu"),), **options)
            x, steps = inputs(rows * chunks), []
            for _ in range(turns + 2):
                model.zero_grad()
                torch.accelerator.synchronize(0)
                late.intervals()
                start, begun = late.now(), process_time()
                model.step(x)
                host[offload] = min(host.get(offload, math.inf), process_time() - begun)
                torch.accelerator.synchronize(0)
                did = late.intervals()
                steps.append((max(interval.end for interval in did) - start, computed(did)))
        # Of the last way, with all of it in host memory.
        seconds, moved = steps[2:], transfers_of(runs_of(model).host_memory)  # type: ignore[union-attr]
        with counted():
            model.step(x)
    actions = program("LayerMajor", chunks, [0] * blocks)
    size = sum(parameter.nbytes for parameter in pinned_block().parameters())
    upload = size / CARD["link"] + len(list(GPTBlock().parameters())) * 1e-5
    ideal = streamed(actions, SLOTS, lambda action: costs[action.kind], lambda _: upload)
    uploads = residency(actions, SLOTS).uploads
    copying = (uploads + blocks) * upload
    hidden = [1 - (step - busy) / copying for step, busy in seconds]
    should = 1 - (ideal.waited + upload) / copying
    return {
        "blocks": blocks,
        "chunks": chunks,
        "tokens": rows * chunks * TOKENS,
        "forward over upload": costs["F"] * chunks / upload,
        "should hide": should,
        "hides": spread(hidden),
        "of what should": spread(share / should for share in hidden),
        "seconds": spread(step for step, _ in seconds),
        "on paper": ideal.seconds + upload,
        "host of a cell": host[False] / (2 * chunks * blocks),
        "host of a cell, offload": host[True] / (2 * chunks * blocks),
        "host of an upload": (host["weights"] - host[False]) / uploads,
        "weights on the device over the slots": max(moved.peaks.values()) / (SLOTS * size),
    }


def measure(args: argparse.Namespace) -> Row:
    """Measure numbers of micro-batches, with which copies hide more and more."""
    torch.set_num_threads(1)
    os.environ.setdefault("LATE_DEVICES", "1")
    from tests import late

    late.load()
    progress, rows = Progress(len(args.chunks)), []
    for chunks in args.chunks:
        progress(f"{args.blocks} blocks, {chunks} micro-batches of {args.rows} sequences")
        rows.append(measured(args.blocks, args.rows, chunks, args.turns))
    return {"unit": "seconds, simulated", "card": CARD, "rows": rows, "aims": aims(rows)}


def aims(rows: Sequence[Row]) -> list[Row]:
    """Return what was aimed at."""
    shares = [row["of what should"]["median"] for row in rows]
    peak = max(row["weights on the device over the slots"] for row in rows)
    return [
        aim("simulated: copies that hide over those that should, lowest", min(shares), least=AIM),
        aim("weights on the device over the slots, highest", peak, most=1.0),
    ]


def offload(result: Row) -> str:
    """Return a table of the numbers of micro-batches."""
    of_cells = "host of a cell, us: resident / offload"
    columns: dict[str, Any] = {
        **{"micro-batches": "chunks", "tokens": "tokens"},
        **{"forward / upload": "forward over upload:.2f", "should hide": "should hide:.2f"},
        **{"hides": "hides:2", "of what should": "of what should:2"},
        "on paper, ms": lambda row: f"{row['on paper'] * 1e3:.0f}",
        "step, ms": lambda row: shown(row["seconds"], 0, 1e3),
        of_cells: lambda row: f"{row['host of a cell'] * 1e6:.0f} / {row['host of a cell, offload'] * 1e6:.0f}",
        "of an upload, us": lambda row: f"{row['host of an upload'] * 1e6:.0f}",
        "weights / slots": "weights on the device over the slots:.2f",
    }
    return table_of(result["rows"], columns)


PARTS = {"offload": Part("offload", measure, {"simulated: weights in host memory": offload})}


def main() -> None:
    program_ = Program("offload", __doc__, PARTS)
    program_.add("--blocks", type=int, default=8)
    program_.add("--rows", type=int, default=16, help="sequences of a micro-batch")
    program_.add("--chunks", nargs="+", type=int, default=[2, 4, 8, 16])
    program_.add("--turns", type=int, default=3)
    program_.run()


if __name__ == "__main__":
    main()
