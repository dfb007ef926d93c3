"""Random models for plans: the seed decides depth and widths, which differ from layer to layer.

Uneven models are what plans are for: where layers are alike, an even balance is as good as any. Random numbers decide
how much a model computes, too; the mini-batch has as many rows as that takes, by counting, so that it is the same on
every machine.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torchgpipe
from benchmarks.models.gpt import Block
from benchmarks.peers import Request

__all__ = ["DEVICES", "FAMILIES", "PlanModel", "mean_of_squares", "plan_model", "plan_of"]

#: Floating-point operations of a forward pass of a mini-batch, the least and the most. A step on two cores takes about
#: 30 to 300 ms.
OPERATIONS = (4e8, 1.6e9)

#: What plans are for: two devices of a core each.
DEVICES = ("cpu:0", "cpu:1")

#: A mini-batch has a multiple of so many rows, the most micro-batches that plans try on two devices.
ROWS = 32


class PlanModel(NamedTuple):
    """A model to plan for.

    Attributes:
        model: the model
        sample: an input of a few rows
        batch: the rows of a mini-batch
    """

    model: nn.Module
    sample: Tensor
    batch: int


def plan_model(family: str, seed: int, shrink: int = 1) -> PlanModel:
    """Return the model of a family and a seed, the same for the same seed.

    Args:
        family: a key of `FAMILIES`
        seed: any number
        shrink: how many times fewer operations the mini-batch takes
    """
    random = Random(f"{family} {seed}")
    torch.manual_seed(seed)
    model, sample = FAMILIES[family](random)
    operations = OPERATIONS[0] * (OPERATIONS[1] / OPERATIONS[0]) ** random.random() / shrink
    batch = ROWS * max(1, round(operations / _operations(model, sample) / ROWS))
    return PlanModel(model, sample, batch)


def plan_of(request: Request) -> tuple[PlanModel, torchgpipe.Plan]:
    """Return the model of a request, and its plan on two devices of a core each."""
    torch.set_num_threads(2)
    about = plan_model(request["family"], request["seed"], request["shrink"])
    options: Any = {"devices": DEVICES, "optimizer": torch.optim.AdamW, "loss_fn": mean_of_squares}
    return about, torchgpipe.plan(about.model, about.sample, batch=about.batch, seconds=request["seconds"], **options)


def mean_of_squares(output: Tensor, _target: Any = None) -> Tensor:
    """Return a loss whose gradient depends on the output."""
    return output.square().mean()


def _operations(model: nn.Module, sample: Tensor) -> float:
    """Return the floating-point operations of forward, for a row."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(model).to("meta")(sample.to("meta"))
    return counter.get_total_flops() / len(sample)


def mlp(random: Random) -> tuple[nn.Module, Tensor]:
    """Return linear layers of very different widths, each with an activation, some with a layer norm."""
    widths = [random.choice([128, 192, 256, 384, 512, 768, 1024]) for _ in range(random.randint(6, 14))]
    layers = []
    for a, b in pairwise(widths):
        norm = [nn.LayerNorm(b)] if random.random() < 0.3 else []
        layers.append(nn.Sequential(nn.Linear(a, b), *norm, random.choice([nn.ReLU, nn.GELU, nn.Tanh])()))
    return nn.Sequential(*layers), torch.randn(4, widths[0])


def convolutions(random: Random) -> tuple[nn.Module, Tensor]:
    """Return convolutions with batch norm and pooling, and a classifier; the channels differ from layer to layer."""
    size, before = random.choice([24, 32]), 3
    sample = torch.randn(4, before, size, size)
    layers: list[nn.Module] = []
    for _ in range(random.randint(5, 9)):
        channels = random.choice([8, 12, 16, 24, 32, 48])
        convolution = nn.Conv2d(before, channels, random.choice([3, 3, 5]), padding="same", bias=False)
        layers.append(nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU()))
        if size > 8 and random.random() < 0.4:
            layers.append(nn.MaxPool2d(2))
            size //= 2
        before = channels
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)))
    return nn.Sequential(*layers), sample


def transformer(random: Random) -> tuple[nn.Module, Tensor]:
    """Return a transformer that is no Sequential, whose blocks have hidden layers of very different widths."""
    width, length = random.choice([64, 96, 128]), random.choice([16, 24, 32])
    hidden = [random.choice([1, 2, 3, 4, 6, 8]) * width for _ in range(random.randint(3, 8))]
    model = Transformer(random.choice([500, 1000]), width, length, hidden)
    return model, torch.randint(500, (4, length))


class Transformer(nn.Module):
    """A language model of plain modules.

    Args:
        words: the number of words
        width: of the residual stream
        length: of the inputs
        hidden: the width of the hidden layer of each block
    """

    def __init__(self, words: int, width: int, length: int, hidden: list[int]) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList([Block(width, 4, wide) for wide in hidden])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.words(input) + self.place
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


#: By name, what makes a model and a sample.
FAMILIES = {"mlp": mlp, "conv": convolutions, "transformer": transformer}
