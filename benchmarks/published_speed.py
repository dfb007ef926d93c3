"""The speed of AmoebaNet-D, ResNet-101, U-Net and a Transformer, published beside simulated: a part of published.py.

The experiments are torchgpipe's on Tesla P40, by its documentation, with its balances, mini-batches and micro-batches.
The last column is what the GPipe paper has of the same models (Huang et al., 2018, table 2 and figure 3b), on TPUs and
on P100; of the Transformer-48 there is no other.

Nothing is measured here. The operations of each layer are counted on the meta device (`torch.utils.flop_counter`, which
counts convolutions and matrix products), backward takes twice as many, and a micro-batch that is recomputed takes its
forward twice. The program of `GPipe.forward` runs with these times on paper. So three simulated speeds stand beside the
published one:

    equal     all partitions have the same operations: only the bubble and the recomputation are left
    theirs    the published balance: what its partitions differ by is added
    ours      the balance that `torchgpipe_balancing.partition` finds for the operations of the layers

What is missing between `theirs` and the published speed is what operations do not tell: layers that move memory and
compute little, copies between devices, launches, and larger mini-batches that use a device better.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import amoebanetd, resnet101, unet
from benchmarks.models.amoebanet import balance_of_cells
from benchmarks.program import Progress
from benchmarks.records import Row, table_of
from torchgpipe.schedule import Action, program, simulate
from torchgpipe.schedule.action import with_recomputation
from torchgpipe_balancing import partition

__all__ = ["FAMILIES", "measure", "published_speed"]


class Experiment(NamedTuple):
    """A pipeline whose speed is published.

    Attributes:
        m: the micro-batches
        balance: the layers of each partition, or the cells
        published: how often faster than the first experiment it is
        paper: the same in the GPipe paper, as it is printed
        recomputes_last: whether the last micro-batch is recomputed as well
    """

    m: int
    balance: Sequence[int]
    published: float
    paper: str = "-"
    recomputes_last: bool = False


class Family(NamedTuple):
    """The experiments of a model.

    Attributes:
        name: of the model
        make: makes it
        sample: the shape of an image
        is_plain: whether all is compared with the plain model, and not with the first experiment
        in_cells: whether balances count the cells of an AmoebaNet-D
        experiments: the experiments
    """

    name: str
    make: Callable[[], nn.Sequential]
    sample: tuple[int, int, int]
    is_plain: bool
    in_cells: bool
    experiments: Sequence[Experiment]

    def balance_of(self, model: nn.Sequential, experiment: Experiment) -> list[int]:
        """Return the number of layers in each partition of an experiment."""
        return balance_of_cells(model, experiment.balance) if self.in_cells else list(experiment.balance)


FAMILIES = [
    Family(
        "AmoebaNet-D (18, 256)",
        lambda: amoebanetd(1000, 18, 256),
        (3, 224, 224),
        False,
        True,
        [
            Experiment(1, [7, 17], 1.0, "1", True),
            Experiment(4, [9, 15], 1.539, "1.07"),
            Experiment(32, [9, 15], 1.773, "1.21"),
            Experiment(1, [3, 4, 5, 12], 1.004, "1.13", True),
            Experiment(4, [3, 6, 7, 8], 1.666, "1.26"),
            Experiment(32, [3, 6, 7, 8], 2.709, "1.84"),
            Experiment(1, [2, 2, 2, 2, 2, 3, 4, 7], 0.932, "1.38", True),
            Experiment(4, [2, 2, 2, 3, 3, 4, 4, 4], 2.621, "1.72"),
            Experiment(32, [2, 2, 2, 3, 3, 4, 4, 4], 4.953, "3.48"),
        ],
    ),
    Family(
        "ResNet-101",
        resnet101,
        (3, 224, 224),
        True,
        False,
        [
            Experiment(2, [370], 0.853, "0.80"),
            Experiment(1667, [135, 235], 1.414, "1.42"),
            Experiment(256, [44, 92, 124, 110], 2.774, "2.18"),
            Experiment(150, [26, 22, 33, 44, 44, 66, 66, 69], 4.294, "2.89"),
        ],
    ),
    Family(
        "U-Net (5, 64)",
        lambda: unet(5, 5, 64, dropout=0.1),
        (3, 192, 192),
        True,
        False,
        [
            Experiment(2, [241], 0.858),
            Experiment(32, [104, 137], 1.246),
            Experiment(16, [30, 66, 84, 61], 2.352),
            Experiment(40, [16, 27, 31, 44, 22, 57, 27, 17], 3.105),
        ],
    ),
    Family(
        "Transformer-48",
        lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(48)]),  # Its layers are equal; no more is known of them.
        (8,),
        False,
        False,
        [
            Experiment(m, [48 // n] * n, published, f"{published:g}", True)
            for n, speeds in ((2, (1.0, 1.7, 1.8)), (4, (1.07, 3.2, 3.4)), (8, (1.3, 4.8, 6.3)))
            for m, published in zip((1, 4, 32), speeds)
        ],
    ),
]


def operations(model: nn.Sequential, sample: Sequence[int]) -> list[float]:
    """Return the operations of each layer in a forward of one image, in units of all of them together."""
    x: Any = torch.empty(1, *sample, device="meta")
    counts = []
    for layer in model.eval():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            x = layer(x)
        counts.append(counter.get_total_flops())
    return [count / sum(counts) for count in counts]


def loads_of(costs: Sequence[float], balance: Sequence[int]) -> list[float]:
    """Return the operations of each partition."""
    rest = iter(costs)
    return [sum(next(rest) for _ in range(size)) for size in balance]


def seconds_of(loads: Sequence[float], experiment: Experiment) -> float:
    """Return the simulated time of a mini-batch, in forwards of the plain model with a mini-batch of the same size."""
    m, n = experiment.m, len(loads)
    counts = [m - (not experiment.recomputes_last)] * n
    actions = with_recomputation(program("GPipe", m, range(n)), counts, keeps=False)
    times = {"F": 1.0, "B": 2.0, "R": 1.0}

    def cost(action: Action) -> float:
        return times[action.kind] * loads[action.j] / m

    return simulate(actions, cost).seconds


def rows_of(family: Family) -> Iterator[Row]:
    """Yield the row of each experiment of a model."""
    with torch.device("meta"):
        model = family.make()
    costs = operations(model, family.sample)
    base: dict[str, float] = {}
    for experiment in family.experiments:
        n, balance = len(experiment.balance), family.balance_of(model, experiment)
        loads = {
            "equal": [1 / n] * n,
            "theirs": loads_of(costs, balance),
            "ours": loads_of(costs, partition(costs, n)),
        }
        seconds = {name: seconds_of(load, experiment) for name, load in loads.items()}
        base = base or (dict.fromkeys(loads, 3.0) if family.is_plain else dict(seconds))
        yield {
            **{"model": family.name, "n": n, "m": experiment.m, "balance": balance},
            **{"published": experiment.published, "paper": experiment.paper},
            "speed": {name: base["theirs"] / taken for name, taken in seconds.items()},
            "largest": {name: max(load) * n for name, load in loads.items()},
        }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Count and simulate each experiment. Nothing is computed, so the machine does not matter."""
    progress, rows = Progress(len(FAMILIES)), []
    for family in FAMILIES:
        progress(family.name)
        rows += rows_of(family)
    return {"unit": "times as fast as the plain model, or as n = 2, m = 1", "rows": rows}


def published_speed(result: dict[str, Any]) -> str:
    """Return a table of the experiments: published, and simulated."""

    def of(key: str, name: str) -> Callable[[Row], str]:
        return lambda row: f"{row[key][name]:.2f}"

    columns: dict[str, Any] = {
        **{"model": "model", "n": "n", "m": "m"},
        "published": lambda row: f"{row['published']:.3f}",
        **{"theirs, simulated": of("speed", "theirs"), "largest / mean": of("largest", "theirs")},
        **{"ours, simulated": of("speed", "ours"), "largest / mean ": of("largest", "ours")},
        **{"equal, simulated": of("speed", "equal"), "Huang et al.": "paper"},
    }
    return table_of(result["rows"], columns)
