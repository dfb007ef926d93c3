"""A recorded step whose blocks sleep, so that devices work side by side on any machine: for the picture of the README.

Eight micro-batches pass eight blocks on four devices under 1F1B. Each block sleeps in forward, and twice as long in
backward. What is drawn is what `torchgpipe.record` has measured, with all time of the host between the cells.

    python -m benchmarks.side_by_side    # -> results/side_by_side.json, in a second; then python docs/figures.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import torchgpipe
from benchmarks.program import Command
from benchmarks.records import table
from benchmarks.step_sleeping import Sleeping
from torchgpipe import GPipe
from torchgpipe.schedule import program, simulate

__all__ = ["side_by_side"]

DEVICES, MICRO_BATCHES = 4, 8

KINDS = {"forward": "F", "backward": "B"}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Record the last of a few steps."""
    blocks = nn.Sequential(*[Sleeping(args.sleep / 2) for _ in range(2 * DEVICES)])
    model = GPipe(
        blocks,
        [2] * DEVICES,
        devices=[f"cpu:{k}" for k in range(DEVICES)],
        chunks=MICRO_BATCHES,
        checkpoint="never",
        loss_fn=lambda output, _: output.mean(),
    )
    x = torch.zeros(MICRO_BATCHES, 1, requires_grad=True)  # So that the first block has both paths of backward.
    model.step(x)
    with torchgpipe.record(model, steps=1) as timeline:
        for _ in range(3):
            model.step(x)
    spans = [span for span in timeline.spans if span.computes]
    began = min(span.start for span in spans)
    seconds = {"F": args.sleep, "B": 2 * args.sleep, "I": args.sleep, "W": args.sleep}
    simulated = simulate(program("1F1B", MICRO_BATCHES, range(DEVICES)), seconds)  # type: ignore[arg-type]
    return {
        "devices": DEVICES,
        "seconds of a block": args.sleep / 2,
        "simulated": simulated.seconds,
        "one device at a time": 3 * args.sleep * DEVICES * MICRO_BATCHES,
        "spans": [
            [
                span.partition,
                KINDS[span.kind],
                span.micro_batch,
                round(span.start - began, 6),
                round(span.end - began, 6),
            ]
            for span in spans
        ],
    }


def side_by_side(result: dict[str, Any]) -> str:
    """Return a table of the step: measured, simulated, and with one device at a time."""
    if "spans" not in result:
        return ""
    measured = max(end for *_, end in result["spans"])
    rows = [
        ["measured", measured],
        ["simulated", result["simulated"]],
        ["one device at a time", result["one device at a time"]],
    ]
    return table([[name, f"{seconds * 1e3:.0f} ms"] for name, seconds in rows], ["a step", "time"])


def main() -> None:
    command = Command(
        "side_by_side", __doc__, show=lambda result: {"a step of blocks that sleep": side_by_side(result)}
    )
    command.add("--sleep", type=float, default=0.02, help="seconds of a partition's forward")
    command.finish(**measure(command.parse()))


if __name__ == "__main__":
    main()
