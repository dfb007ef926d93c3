"""Train a language model in mixed precision, and accumulate the gradients of several mini-batches in each step.

The loop is the same as without a pipeline: autocast around the model and the loss; for float16 a scaler, so that small
gradients do not underflow; a loss divided by the number of mini-batches in a step; and gradients that are first
unscaled, and then clipped by their norm over all devices.

    python examples/mixed_precision.py                     # bfloat16, some seconds on two CPU cores
    python examples/mixed_precision.py --dtype float16     # with a scaler
    python examples/mixed_precision.py --dtype float32     # to compare the loss

The model and the text are those of ``language_model.py``. The example uses all accelerators of the machine. On a
machine without accelerators the partitions share the CPU, which takes longer: few CPUs are fast at half precision.
"""

import argparse

import torch
from language_model import language_model, read_text, windows
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from torchgpipe import GPipe


def build(options: argparse.Namespace) -> GPipe:
    torch.manual_seed(0)
    model = language_model(layers=2, width=32, heads=2, context=options.context)
    partitions = min(torch.accelerator.device_count() or 2, len(model))
    balance = [len(part) for part in torch.arange(len(model)).tensor_split(partitions)]
    return GPipe(model, balance, chunks=options.chunks)


def train(model: GPipe, options: argparse.Namespace) -> list[float]:
    """Train, and return the loss of every step."""
    text, _ = read_text(None)
    first, last = model.devices[0], model.devices[-1]
    dtype = getattr(torch, options.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(first.type, enabled=dtype == torch.float16)
    order = torch.Generator().manual_seed(0)
    losses: list[float] = []
    skipped = 0

    with tqdm(desc=options.dtype, total=options.steps, unit=" steps") as progress:
        for _ in range(options.steps):
            mean = 0.0
            for _ in range(options.accumulate):
                starts = torch.randint(len(text) - options.context, (options.batch,), generator=order)
                inputs, targets = windows(text, starts, options.context)
                with torch.autocast(first.type, dtype, enabled=dtype != torch.float32):
                    scores = model(inputs.to(first))
                    loss = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten().to(last))
                    loss = loss / options.accumulate
                scaler.scale(loss).backward()
                mean += loss.item()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            scaler.step(optimizer)  # skipped if a gradient has overflowed; `update` then reduces the scale
            scaler.update()
            optimizer.zero_grad()

            skipped += not norm.isfinite().item()
            losses.append(mean)
            progress.set_postfix(loss=f"{mean:.3f}", norm=f"{norm:.2f}", refresh=False)
            progress.update()
    print(f"{options.dtype}: first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}, {skipped} steps skipped")
    return losses


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train in mixed precision, with accumulated gradients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="precision of autocast")
    add("--accumulate", type=int, default=2, help="mini-batches in a step")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--batch", type=int, default=8, help="windows of text in a mini-batch")
    add("--context", type=int, default=16, help="bytes in a window")
    add("--steps", type=int, default=40, help="number of training steps")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[float]:
    options = parse_options(arguments)
    if not torch.accelerator.is_available():
        torch.set_num_threads(1)  # The model is small: more threads would wait for each other.
    return train(build(options), options)


if __name__ == "__main__":
    main()
