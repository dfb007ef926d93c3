"""Measure a model on the devices that are there, and find its quickest pipeline."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from torchgpipe.command.load import function_of
from torchgpipe.command.report import Report, read_memories

__all__ = ["OPTIMIZERS", "add_arguments", "run"]

#: By name, in small letters, the optimizers of PyTorch; none keeps no states.
OPTIMIZERS: dict[str, Any] = {name.lower(): of for name, of in vars(torch.optim).items() if isinstance(of, type)}
OPTIMIZERS["none"] = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "model",
        metavar="FILE.py:FUNCTION",
        help="a function that returns a model and a sample, or these and a dict of arguments as loss_fn and target",
    )
    parser.add_argument("--batch", type=int, required=True, help="the rows of a mini-batch")
    parser.add_argument("--devices", metavar="A,B", help="such as cuda:0,cuda:1 (default: those that are there)")
    parser.add_argument("--memory", metavar="2x24GiB", help="the memory of each device (default: what it has)")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, metavar="NAME", default="adamw", help="of PyTorch (default: adamw)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="roughly how long to measure (default: 10)")
    parser.add_argument("--svg", metavar="FILE", help="write a picture of the planned step")


def run(given: argparse.Namespace) -> Report:
    """Plan, and tell the plan."""
    from torchgpipe_balancing.planning.plan import plan

    tested = function_of(given.model)
    if sys.stderr.isatty():
        print(f"measuring for some {given.seconds:g} seconds ...", file=sys.stderr)
    made = plan(
        tested.model,
        tested.sample,
        batch=given.batch,
        devices=given.devices.split(",") if given.devices else None,
        memory=read_memories(given.memory) if given.memory else None,
        optimizer=OPTIMIZERS[given.optimizer],
        seconds=given.seconds,
        **tested.options,
    )
    if given.svg:
        made.plot(given.svg)
    told = {name: getattr(made, name) for name in ("schedule", "chunks", "balance", "recomputed", "seconds")}
    told |= {"devices": [*map(str, made.devices)], "idle": made.best.bubble, "memory": [*made.best.memory]}
    return Report(str(made), told)
