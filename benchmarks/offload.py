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
from collections.abc import Sequence
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import torchgpipe
from benchmarks.program import Command, Progress
from benchmarks.records import shown, spread, table
from benchmarks.simulated_gpus import TOKENS, Busy, GPTBlock, kernels
from benchmarks.tiny_steps import Chain, mean
from torchgpipe.frames.pipelined import runs_of
from torchgpipe.schedule import program
from torchgpipe.schedule.residency import residency, streamed

__all__ = ["offload"]

Row = dict[str, Any]

#: What such a card reaches in practice: products of matrices in bfloat16, memory, and the link to the host.
CARD = {"flops": 165e12, "bandwidth": 0.9e12, "link": 25e9}
SLOTS = 2

#: The least share of the copies that hide, of those that should.
AIM = 0.9


def pinned_block() -> nn.Module:
    """Return a block in pinned host memory, which nobody touches."""
    with torch.device("meta"):
        block = GPTBlock().to(torch.bfloat16)
    block.to_empty(device="cpu")
    for parameter in block.parameters():
        parameter.data = torch.empty_like(parameter, pin_memory=True)
    return block


def inputs(rows: int, device: str = "late:0") -> Tensor:
    return torch.empty(rows, TOKENS, GPTBlock.width, device=device, dtype=torch.bfloat16)


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

    with late.on_clock(late.Speed(**CARD)):
        costs = costs_of(rows)
        host: dict[Any, float] = {}
        for offload in (False, "weights", True):
            plain = Chain([pinned_block() for _ in range(blocks)])
            options: Any = {"devices": ["late:0"] * blocks, "chunks": chunks, "loss_fn": mean, "verify": False}
            options |= {"checkpoint": True, "schedule": "LayerMajor", "balance": [1] * blocks}
            options |= {"offload": offload, "slots": SLOTS} if offload else {}
            model: Any = torchgpipe.pipelined(plain, (inputs(1, "cpu"),), **options)
            x, took = inputs(rows * chunks), []
            for _ in range(turns + 2):
                model.zero_grad()
                torch.accelerator.synchronize(0)
                late.intervals()
                start, begun = late.now(), process_time()
                model.step(x)
                host[offload] = min(host.get(offload, math.inf), process_time() - begun)
                torch.accelerator.synchronize(0)
                did = late.intervals()
                busy = Busy([one for one in did if one.kind == "kernel"]).until(math.inf)
                took.append((max(one.end for one in did) - start, busy))
        # Of the last way, with all of it in host memory.
        seconds, memory = took[2:], runs_of(model).host_memory  # type: ignore[union-attr]
        assert memory is not None
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
        "of what should": spread(one / should for one in hidden),
        "seconds": spread(step for step, _ in seconds),
        "on paper": ideal.seconds + upload,
        "host of a cell": host[False] / (2 * chunks * blocks),
        "host of a cell, offload": host[True] / (2 * chunks * blocks),
        "host of an upload": (host["weights"] - host[False]) / uploads,
        "weights on the device over the slots": max(memory.peaks.values()) / (SLOTS * size),
    }


def measure(args: argparse.Namespace) -> Row:
    """Measure numbers of micro-batches, with which copies hide more and more."""
    progress, rows = Progress(len(args.chunks)), []
    for chunks in args.chunks:
        progress(f"{args.blocks} blocks, {chunks} micro-batches of {args.rows} sequences")
        rows.append(measured(args.blocks, args.rows, chunks, args.turns))
    return {"rows": rows, "aims": aims(rows)}


def aims(rows: Sequence[Row]) -> list[Row]:
    """Return what was aimed at."""
    shares = [row["of what should"]["median"] for row in rows]
    peak = max(row["weights on the device over the slots"] for row in rows)
    return [
        {
            "aim": "simulated: copies that hide over those that should, lowest",
            "at least": AIM,
            "reached": min(shares),
            "met": min(shares) >= AIM,
        },
        {"aim": "weights on the device over the slots, highest", "at most": 1.0, "reached": peak, "met": peak <= 1},
    ]


def offload(result: Row) -> str:
    """Return a table of the numbers of micro-batches."""
    lines = [
        [
            row["chunks"],
            row["tokens"],
            f"{row['forward over upload']:.2f}",
            f"{row['should hide']:.2f}",
            shown(row["hides"], 2),
            shown(row["of what should"], 2),
            f"{row['on paper'] * 1e3:.0f}",
            shown({key: value * 1e3 for key, value in row["seconds"].items()}, 0),
            f"{row['host of a cell'] * 1e6:.0f} / {row['host of a cell, offload'] * 1e6:.0f}",
            f"{row['host of an upload'] * 1e6:.0f}",
            f"{row['weights on the device over the slots']:.2f}",
        ]
        for row in result.get("rows", [])
    ]
    header = ["micro-batches", "tokens", "forward / upload", "should hide", "hides", "of what should", "on paper, ms"]
    header += ["step, ms", "host of a cell, us: resident / offload", "of an upload, us", "weights / slots"]
    return table(lines, header) if lines else ""


def main() -> None:
    command = Command("offload", __doc__, show=lambda result: {"simulated: weights in host memory": offload(result)})
    command.add("--blocks", type=int, default=8)
    command.add("--rows", type=int, default=16, help="sequences of a micro-batch")
    command.add("--chunks", nargs="+", type=int, default=[2, 4, 8, 16])
    command.add("--turns", type=int, default=3)
    args = command.parse()
    torch.set_num_threads(1)
    os.environ.setdefault("LATE_DEVICES", "1")
    from tests import late

    late.load()
    command.finish(unit="seconds, simulated", card=CARD, **measure(args))


if __name__ == "__main__":
    main()
