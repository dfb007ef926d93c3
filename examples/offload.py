"""Train a model whose weights live in host memory, and compare with weights that stay on the device.

    python examples/offload.py                      # in some seconds on a CPU
    python examples/offload.py --partitions 8 --slots 1

A small language model learns to repeat its input. The pipeline in host memory trains it bit for bit as the one whose
weights stay, while a device holds the weights of a few partitions at a time.
"""

import argparse
import copy
from typing import Any

import torch
from torch import Tensor, nn

import torchgpipe

WORDS = 16


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(width, 2, batch_first=True) for _ in range(layers)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y.transpose(1, 2)


def train(model: Any, steps: int) -> list[float]:
    """Train, and return the losses."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = torch.randint(WORDS, (16, 8))
        losses.append(float(model.step(ids, target=ids)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    plain = Model(options.width, options.layers)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    losses = []
    for offload in (False, True):
        model = torchgpipe.pipelined(
            copy.deepcopy(plain),
            torch.arange(16).view(2, 8),
            chunks=4,
            devices=[device],
            partitions=options.partitions,
            balance="size",
            schedule="LayerMajor",
            loss_fn=nn.functional.cross_entropy,
            checkpoint=True,
            offload=offload,
            slots=options.slots,
        )
        losses.append(train(model, options.steps))
        where = "in host memory" if offload else f"on {device}"
        print(f"weights {where}: loss {losses[-1][0]:.3f}, after {options.steps} steps {losses[-1][-1]:.3f}")
    print("the losses are equal" if losses[0] == losses[1] else "the losses differ")


if __name__ == "__main__":
    main()
