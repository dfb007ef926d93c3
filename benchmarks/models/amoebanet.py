"""AmoebaNet-D, whose cells were found by evolution, with every node of a cell a layer of its own.

A cell has seven states. The first two are made of the outputs of the last cell and of the one before it, which
comes by a skip; each other is the sum of two operations, each on an earlier state. What leaves the cell is the
concatenation of some states:

      output of cell k-1 ---.-- Stash (for cell k+1)
                            |
      output of cell k-2 -- States -- node 2 -- node 3 -- node 4 -- node 5 -- node 6 -- Concat --- output of cell k
                              (0, 1)                                              (0, 3, 4, 6)

Between the layers of a cell go the states that are still needed, as a tuple.

The cells are those of Real, Aggarwal, Huang, Le: Regularized Evolution for Image Classifier Architecture Search, 2018,
as the authors published them in code, which is also what the GPipe paper trained: the output of a normal cell has four
states, not three.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.skips import Stash, joined
from torchgpipe.skip import Namespace, pop, skippable

__all__ = ["amoebanetd", "balance_of_cells", "cells"]

States = tuple[Tensor, ...]


class Sum(NamedTuple):
    """A node: two operations by name, and the states that they are applied to."""

    left: tuple[str, int]
    right: tuple[str, int]


class Genotype(NamedTuple):
    """A kind of cell.

    Attributes:
        nodes: states 2, 3, ...
        output: the states that are concatenated
    """

    nodes: Sequence[Sum]
    output: Sequence[int]

    def needed_after(self, state: int) -> set[int]:
        """Return the states that are needed after this one has been computed."""
        later = self.nodes[state - 1 :]
        return {*self.output, *(operand for node in later for _, operand in node)}


NORMAL = Genotype(
    nodes=(
        Sum(("conv_1x1", 1), ("max_pool_3x3", 1)),
        Sum(("none", 1), ("conv_1x7_7x1", 0)),
        Sum(("conv_1x1", 0), ("conv_1x7_7x1", 0)),
        Sum(("max_pool_3x3", 2), ("none", 2)),
        Sum(("avg_pool_3x3", 1), ("conv_1x1", 5)),
    ),
    output=(0, 3, 4, 6),
)

#: Halves height and width: what it does to states 0 and 1 has stride 2.
REDUCTION = Genotype(
    nodes=(
        Sum(("max_pool_2x2", 0), ("max_pool_3x3", 0)),
        Sum(("none", 2), ("conv_3x3", 1)),
        Sum(("conv_1x7_7x1", 2), ("max_pool_3x3", 2)),
        Sum(("none", 3), ("max_pool_2x2", 1)),
        Sum(("avg_pool_3x3", 2), ("conv_1x1", 3)),
    ),
    output=(4, 5, 6),
)


def _conv(channels: int, output: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)) -> nn.Module:
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(channels, output, kernel, stride, padding, bias=False), nn.BatchNorm2d(output)
    )


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return _conv(channels, channels, stride=(stride, stride))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        _conv(channels, narrow), _conv(narrow, narrow, (3, 3), (stride, stride)), _conv(narrow, channels)
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        _conv(channels, narrow),
        _conv(narrow, narrow, (1, 7), (1, stride)),
        _conv(narrow, narrow, (7, 1), (stride, 1)),
        _conv(narrow, channels),
    )


#: From channels and stride. All of them round the halves of odd sizes up.
OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda channels, stride: nn.Identity(),
    "avg_pool_3x3": lambda channels, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    "max_pool_2x2": lambda channels, stride: nn.MaxPool2d(2, stride, ceil_mode=True),
    "max_pool_3x3": lambda channels, stride: nn.MaxPool2d(3, stride, padding=1),
    "conv_1x1": _conv_1x1,
    "conv_3x3": _conv_3x3,
    "conv_1x7_7x1": _conv_1x7_7x1,
}


class Halve(nn.Module):
    """Halves height and width, and still looks at pixels of odd and of even place."""

    def __init__(self, channels: int, output: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, output // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, output - output // 2, 1, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(output)

    def forward(self, input: Tensor) -> Tensor:
        input = F.relu(input)
        moved = F.pad(input, (0, 1, 0, 1))[:, :, 1:, 1:]
        output: Tensor = self.bn(torch.cat([self.even(input), self.odd(moved)], dim=1))
        return output


@skippable(pop=["skip"])
class FirstStates(nn.Module):
    """States 0 and 1 of a cell, of the same shape: from the last cell's output, and from the skip."""

    def __init__(self, last: nn.Module, before: nn.Module) -> None:
        super().__init__()
        self.last = last
        self.before = before

    def forward(self, input: Tensor) -> Generator[pop, Tensor, States]:
        skip = yield pop("skip")
        return self.last(input), self.before(skip)


class Node(nn.Module):
    """Adds a state, and drops the states that no later node needs.

    Args:
        left, right: the operations
        operands: the places of their states in the input
        kept: the places of the states that go on to the next node
    """

    def __init__(self, left: nn.Module, right: nn.Module, operands: tuple[int, int], kept: Sequence[int]) -> None:
        super().__init__()
        self.left = left
        self.right = right
        self.operands = operands
        self.kept = tuple(kept)

    def forward(self, states: States) -> States:
        left, right = self.operands
        state = self.left(states[left]) + self.right(states[right])
        return (*[states[place] for place in self.kept], state)


class Concat(nn.Module):
    """The cell's output, from the states that are left."""

    def forward(self, states: States) -> Tensor:
        return torch.cat(states, dim=1)


def amoebanetd(num_classes: int = 1000, num_layers: int = 18, num_filters: int = 208) -> nn.Sequential:
    """Return AmoebaNet-D (L, D): images of shape (batch, 3, height, width) to logits of shape (batch, num_classes).

    Args:
        num_classes: of the output
        num_layers: L, the number of normal cells, in three stages
        num_filters: D, the channels of a normal cell's states in the first stage; they double from stage to stage

    Raises:
        ValueError: ``num_layers`` is not a multiple of 3, or ``num_filters`` not one of 8.
    """
    if num_layers % 3 or num_layers <= 0:
        raise ValueError(f"num_layers is spread over three stages, so it must be a multiple of 3, but is {num_layers}")
    if num_filters % 8 or num_filters <= 0:
        raise ValueError(f"num_filters is halved three times, so it must be a multiple of 8, but is {num_filters}")

    stage = [NORMAL] * (num_layers // 3)
    cells = [REDUCTION, REDUCTION, *stage, REDUCTION, *stage, REDUCTION, *stage]
    channels = num_filters // 4
    skips = [Namespace() for _ in cells]

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem_conv"] = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
    layers["stem_bn"] = nn.BatchNorm2d(channels)
    layers["stem_stash"] = joined(Stash(), skips[0])  # There is no cell before: the first one has the stem twice.

    last = before = channels
    smaller = False  # whether the last cell's output is, beside that of the cell before
    for k, genotype in enumerate(cells):
        if genotype is REDUCTION:
            channels *= 2
        if k + 1 < len(cells):
            layers[f"cell{k}_stash"] = joined(Stash(), skips[k + 1])
        states = FirstStates(_conv(last, channels), _fitting(before, channels, smaller))
        layers[f"cell{k}_states"] = joined(states, skips[k])
        for name, layer in _nodes(genotype, channels):
            layers[f"cell{k}_{name}"] = layer
        before, last = last, channels * len(genotype.output)
        smaller = genotype is REDUCTION

    layers["relu"] = nn.ReLU()
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(last, num_classes)
    return nn.Sequential(layers)


def cells(model: nn.Sequential) -> list[int]:
    """Return the number of layers of the stem, of each cell in turn, and of what classifies: the layers of torchgpipe's
    own AmoebaNet-D, in which its balances count."""
    names = [name.partition("_")[0] if name.startswith(("stem", "cell")) else "" for name, _ in model.named_children()]
    return [len(list(layers)) for _, layers in groupby(names)]


def balance_of_cells(model: nn.Sequential, balance: Sequence[int]) -> list[int]:
    """Return the number of layers in each partition, given the number of cells."""
    layers = iter(cells(model))
    return [sum(next(layers) for _ in range(count)) for count in balance]


def _fitting(channels: int, output: int, halve: bool) -> nn.Module:
    if halve:
        return Halve(channels, output)
    return nn.Identity() if channels == output else _conv(channels, output)


def _nodes(genotype: Genotype, channels: int) -> Iterator[tuple[str, nn.Module]]:
    alive = [0, 1]
    for state, node in enumerate(genotype.nodes, start=2):
        left, right = (
            OPERATIONS[name](channels, 2 if genotype is REDUCTION and operand < 2 else 1) for name, operand in node
        )
        passed_on = [operand for operand in alive if operand in genotype.needed_after(state)]
        operands = (alive.index(node.left[1]), alive.index(node.right[1]))
        yield f"node{state}", Node(left, right, operands, [alive.index(operand) for operand in passed_on])
        alive = [*passed_on, state]
    yield "concat", Concat()
