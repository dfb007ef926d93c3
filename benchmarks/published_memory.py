"""The memory of AmoebaNet-D and U-Net, published beside counted: a part of published.py.

The experiments are torchgpipe's, with its models, balances, mini-batches and micro-batches: `baseline` is the plain
model on one GPU, and `pipeline-n` has n partitions, with all micro-batches but the last checkpointed. Published is what
torchgpipe 0.0.5 needed on Tesla P40, by its documentation. The last column is what the GPipe paper has of the same
models (Huang et al., 2018, table 1).

Counted are the parameters; the bytes of the model, which are parameters, gradients and, of AmoebaNet-D, the means of
RMSprop; and what is kept for backward (`kept_on_meta.py`); of all devices together. Published activations are all other
memory that PyTorch has taken from the devices at the peak, with temporaries, workspaces and free blocks among it.

The documentation of torchgpipe 0.0.3 counts L by stage, and its AmoebaNet-D has more channels: 90 million parameters
with (6, 208).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.kept_on_meta import kept_by_partitions
from benchmarks.models import amoebanetd, unet
from benchmarks.models.amoebanet import balance_of_cells
from benchmarks.program import Progress
from benchmarks.records import GIB, Row, table_of

__all__ = ["EXPERIMENTS", "Experiment", "Published", "measure", "published_memory"]


class Family(NamedTuple):
    """What all experiments of a model share.

    Attributes:
        make: makes a model of a size
        sample: the shape of an image
        batch: the images of a mini-batch, each of which is a micro-batch of a pipeline
        copies: numbers that are kept of a parameter: itself, its gradient, what the optimizer keeps
    """

    make: Callable[[int, int], nn.Sequential]
    sample: tuple[int, int, int]
    batch: int
    copies: int


#: Sizes are (L, D) of an AmoebaNet-D, and (B, C) of a U-Net.
FAMILIES = {
    "amoebanetd": Family(lambda layers, filters: amoebanetd(1000, layers, filters), (3, 224, 224), 128, 3),
    "unet": Family(lambda convs, channels: unet(5, convs, channels, dropout=0.1), (3, 192, 192), 32, 2),
}


class Published(NamedTuple):
    """What has been published of an experiment.

    Attributes:
        parameters: as it is printed
        model: GiB of parameters, gradients and the optimizer; None if only the total is known
        activations: GiB of all the rest; None if only the total is known, or the memory ran out
        total: GiB of both
        paper: GB of both in the GPipe paper, as they are printed
    """

    parameters: str
    model: float | None = None
    activations: float | None = None
    total: float | None = None
    paper: str = "-"


class Experiment(NamedTuple):
    """A model in a pipeline.

    Attributes:
        name: of the experiment
        model: `amoebanetd` or `unet`
        size: of the model
        balance: the layers of each partition, or the cells of an AmoebaNet-D; None for the plain model
        published: what has been published of it
    """

    name: str
    model: str
    size: tuple[int, int]
    balance: list[int] | None
    published: Published

    def on_meta(self) -> nn.Sequential:
        """Return the model on the meta device, where it takes no memory."""
        with torch.device("meta"):
            return FAMILIES[self.model].make(*self.size)

    def balance_of(self, model: nn.Sequential) -> list[int]:
        """Return the number of layers of our model in each partition."""
        if self.balance is None:
            return [len(model)]
        if self.model != "amoebanetd":
            return self.balance
        return balance_of_cells(model, self.balance)


EXPERIMENTS = [
    Experiment("baseline", "amoebanetd", (18, 208), None, Published("81.5M", 0.91, paper="1.05 / 6.26")),
    Experiment("pipeline-1", "amoebanetd", (18, 416), [24], Published("319.0M", 3.57, 0.91, 4.48, "3.8 / 3.46")),
    Experiment("pipeline-2", "amoebanetd", (18, 544), [16, 8], Published("542.7M", 6.07, 3.39, 9.46, "6.45 / 8.11")),
    Experiment(
        "pipeline-4",
        "amoebanetd",
        (36, 544),
        [16, 12, 7, 7],
        Published("1.06B", 11.80, 6.91, 18.71, "12.53 / 15.21"),
    ),
    Experiment(
        "pipeline-8",
        "amoebanetd",
        (72, 512),
        [23, 16, 11, 6, 6, 5, 5, 6],
        Published("1.84B", 20.62, 10.83, 31.45, "24.62 / 26.24"),
    ),
    Experiment("baseline", "unet", (6, 72), None, Published("362.2M", total=20.3)),
    Experiment("pipeline-1", "unet", (11, 128), [505], Published("2.21B", total=20.5)),
    Experiment("pipeline-2", "unet", (24, 128), [526, 551], Published("4.99B", total=43.4)),
    Experiment("pipeline-4", "unet", (24, 160), [472, 54, 36, 515], Published("7.80B", total=79.1)),
    Experiment("pipeline-8", "unet", (48, 160), [800, 140, 62, 36, 36, 36, 36, 987], Published("15.82B", total=154.1)),
]


def counted(experiment: Experiment) -> Row:
    """Return the row of an experiment."""
    model, (_, sample, batch, copies) = experiment.on_meta(), FAMILIES[experiment.model]
    m = 1 if experiment.balance is None else batch
    parts = kept_by_partitions(model, sample, experiment.balance_of(model), batch // m)
    return {
        **{"model": experiment.model, "size": experiment.size, "experiment": experiment.name, "m": m},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model bytes": [copies * part.parameters for part in parts],
        "kept bytes": [m * part.input + part.saved for part in parts],
        "published": experiment.published._asdict(),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Count each experiment. Nothing is computed, so the machine does not matter."""
    progress, rows = Progress(len(EXPERIMENTS)), []
    for experiment in EXPERIMENTS:
        progress(f"{experiment.model} {experiment.size}, {experiment.name}")
        rows.append(counted(experiment))
    return {"unit": "bytes of each device", "rows": rows}


def published_memory(result: dict[str, Any]) -> str:
    """Return a table of the experiments: counted, and published."""

    def of_all(*keys: str) -> Callable[[Row], str]:
        return lambda row: f"{sum(sum(row[key]) for key in keys) / GIB:.2f}"

    def published(key: str) -> Callable[[Row], str]:
        return lambda row: "-" if row["published"][key] is None else f"{row['published'][key]}"

    columns: dict[str, Any] = {
        **{"model": lambda row: "{} ({}, {})".format(row["model"], *row["size"]), "experiment": "experiment"},
        "parameters": lambda row: f"{row['parameters'] / 1e6:.1f}M",
        "published": published("parameters"),
        **{"model, GiB": of_all("model bytes"), "published, GiB": published("model")},
        **{"kept, GiB": of_all("kept bytes"), "activations, published": published("activations")},
        **{"both, GiB": of_all("model bytes", "kept bytes"), "both, published": published("total")},
        "Huang et al., GB": lambda row: row["published"]["paper"],
    }
    return table_of(result["rows"], columns)
