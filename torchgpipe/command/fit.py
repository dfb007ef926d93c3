"""Tell whether a model fits devices, and how busy each way to train keeps them, without devices and weights."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import torch

from torchgpipe.command.load import configured, on_meta, with_adapters
from torchgpipe.command.plan import OPTIMIZERS
from torchgpipe.command.report import Report, read_memories

__all__ = ["add_arguments", "run"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder or name that transformers reads a configuration from, or file.py:function, which returns a "
        "model and a sample of as many rows as a micro-batch, or these and a dict of arguments as loss_fn and target",
    )
    parser.add_argument("--devices", required=True, metavar="2x24GiB", help="the memory of each device")
    parser.add_argument("--batch", type=int, help="the rows of a mini-batch (default: 4 micro-batches a device)")
    parser.add_argument("--length", type=int, default=2048, help="the tokens of a row (default: 2048)")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights (default: bf16; of a function its own)")
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters of this rank on all layers")
    trained.add_argument("--frozen-4bit", action="store_true", help="train adapters of rank 16 on weights of 4 bits")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, metavar="NAME", default="adamw", help="of PyTorch (default: adamw)"
    )


def run(given: argparse.Namespace) -> Report:
    """Count, and tell what fits."""
    from torchgpipe_balancing.planning.fit import fit

    memory = read_memories(given.devices)
    if (given.batch is not None and given.batch < 1) or given.length < 1:
        raise ValueError(f"--batch and --length must be 1 or more, but got {given.batch} and {given.length}")
    dtype = _DTYPES.get(given.dtype)
    is_function = given.model.rpartition(":")[0].endswith(".py")
    made = on_meta(given.model, dtype) if is_function else configured(given.model, dtype, given.length)
    model = made.model
    if given.lora is not None or given.frozen_4bit:
        model = with_adapters(model, given.lora, four_bits=given.frozen_4bit)
    more = {"batch": given.batch, "optimizer": OPTIMIZERS[given.optimizer], "tell": _tell, **made.options}
    try:
        found = fit(model, made.sample, memory, **more)
    except Exception as error:
        if is_function:
            raise
        read = f"with {' and '.join(made.sample)} the model fails"
        raise ValueError(f"{read}; give a function that makes it with a sample ({error})") from error
    _tell("")
    data = asdict(found)
    data["ways"] = [way._asdict() for way in found.ways]
    return Report(str(found), data)


def _tell(doing: str) -> None:
    """Tell what is being counted, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[Kcounting {doing} ..." if doing else "\r\033[K", end="", file=sys.stderr, flush=True)
