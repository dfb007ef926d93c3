"""Random models, cut at random, for random mini-batches. The seed decides what takes most of a step's memory."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["RandomModel", "random_model"]


class RandomModel(NamedTuple):
    """A model, and how it is trained.

    Attributes:
        about: a few words
        layers: the model
        x: a mini-batch
        balance: the layers of each partition
        m: the number of micro-batches
        mode: 'always' or 'except_last'
        accumulate: whether gradients are there before the step
    """

    about: str
    layers: nn.Sequential
    x: Tensor
    balance: list[int]
    m: int
    mode: str
    accumulate: bool


def random_model(seed: int) -> RandomModel:
    """Return the model of a seed, the same for the same seed."""
    random = Random(seed)
    torch.manual_seed(seed)
    m = random.choice([2, 4, 8, 16])
    rows = m * random.choice([1, 2, 4, 8, 16, 64])
    layers, x = random.choice([mlp, convolutions, transformer])(random, random.choice([4, 6, 8, 12]), rows)
    n = random.choice([1, 2, 3, 4])
    cuts = [0, *sorted(random.sample(range(1, len(layers)), n - 1)), len(layers)]
    name, parameters = type(layers[1]).__name__, sum(parameter.numel() for parameter in layers.parameters())
    about = f"{len(layers)} layers ({name}, ...), {parameters} parameters, input {tuple(x.shape)}"
    balance = [end - start for start, end in pairwise(cuts)]
    return RandomModel(about, layers, x, balance, m, random.choice(["always", "except_last"]), random.random() < 0.5)


def mlp(random: Random, depth: int, rows: int) -> tuple[nn.Sequential, Tensor]:
    """Return linear layers and activations, of one width or of many."""
    widths = [random.choice([8, 16, 32, 48, 63, 64, 128, 256])] * (depth + 1)
    if random.random() < 0.5:
        widths = [random.choice([widths[0], 8, 32, 128, 256]) for _ in widths]
    activation = random.choice([nn.ReLU, nn.Tanh, nn.GELU])
    layers = [nn.Sequential(nn.Linear(a, b), activation()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers), torch.randn(rows, widths[0])


def convolutions(random: Random, depth: int, rows: int) -> tuple[nn.Sequential, Tensor]:
    """Return convolutions with batch norm, some with twice the channels on half the pixels, and a classifier."""
    channels, size = random.choice([8, 16, 32, 64]), random.choice([8, 16, 32])
    x = torch.randn(min(rows, 128), 3, size, size)
    strided = random.random() < 0.5
    layers: list[nn.Module] = []
    before = 3
    for k in range(depth - 1):
        stride = 2 if strided and k % 2 and size > 4 else 1
        channels, size = min(256, channels * stride), size // stride
        convolution = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        layers.append(nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU()))
        before = channels
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(*layers, head), x


def transformer(random: Random, depth: int, rows: int) -> tuple[nn.Sequential, Tensor]:
    """Return an embedding, encoder layers with dropout, and a projection."""
    width, length = random.choice([16, 32, 64, 128]), random.choice([4, 8, 16, 32])
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(depth - 2)]
    x = torch.randint(100, (min(rows, 64), length))
    return nn.Sequential(nn.Embedding(100, width), *layers, nn.Linear(width, 8)), x
