"""Does a pipeline change what is learned? The curves and the accuracy of a ResNet, plain and through a pipeline.

A pipeline gives the gradients of the plain model on the same micro-batches. What is left is batch norm, which
normalises each micro-batch by itself. So the same ResNet is trained with the same seeds in three ways, each with three
sizes of mini-batches, the learning rate growing with them:

    plain           the whole mini-batch at once
    micro-batches   the plain model, one micro-batch after the other
    ours            a pipeline over two partitions

The last two have deferred batch norms, which track running statistics of whole mini-batches, and must have the same
curve: the loss of every step. torchgpipe asked the same of ResNet-101 on ImageNet, where its pipeline and
`nn.DataParallel` differed by less than their spread over seeds: top-1 errors of 21.99 +- 0.13 and 22.02 +- 0.11 percent
with mini-batches of 256, 22.24 +- 0.19 and 22.04 +- 0.24 with 1024, and 22.13 +- 0.09 through the pipeline with 4096.

    python -m benchmarks.training --only accuracy    # handwritten digits, on the CPU: some minutes

The digits come with scikit-learn. All random numbers depend on the seed, so on the CPU the figures can be reproduced.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import resnet
from benchmarks.placement import placed
from benchmarks.program import Progress
from benchmarks.records import Row, spread, table_of
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe_balancing import balance_by_parameters

__all__ = ["measure", "training_curves", "transparency"]

#: By name of the way, the name of its experiments.
WAYS = {"plain": "plain", "micro-batches": "micro-batches", "ours": "pipeline"}


class Data(NamedTuple):
    """Images of shape (count, 3, height, width), and their classes."""

    images: Tensor
    classes: Tensor
    test_images: Tensor
    test_classes: Tensor


class Training(NamedTuple):
    """How a model is trained.

    Attributes:
        batches: the sizes of mini-batches
        epochs: passes over the images
        chunks: the micro-batches that a pipeline splits each into
        partitions: of the pipeline
        rate: the learning rate for the smallest mini-batch; it grows in proportion
    """

    batches: Sequence[int]
    epochs: int
    chunks: int = 4
    partitions: int = 2
    rate: float = 0.05


class Outcome(NamedTuple):
    """What has come of a training.

    Attributes:
        losses: of each step
        accuracy: the share of test images that are classified right in the end
    """

    losses: list[float]
    accuracy: float


def digits() -> Data:
    """Return the 1797 handwritten digits that come with scikit-learn, 8 by 8 pixels doubled in width and height."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from error
    read = load_digits()
    images = torch.from_numpy(read.images).float().div(16).sub(0.5)
    images = F.interpolate(images[:, None], scale_factor=2).expand(-1, 3, -1, -1)
    classes = torch.from_numpy(read.target).long()
    # Other people wrote the last fifth.
    last = len(images) // 5
    return Data(images[:-last], classes[:-last], images[-last:], classes[-last:])


class OneByOne(nn.Module):
    """The plain model, one micro-batch after the other."""

    def __init__(self, module: nn.Module, chunks: int) -> None:
        super().__init__()
        self.module = DeferredBatchNorm.convert_deferred_batch_norm(module, chunks=chunks)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.module(part) for part in x.chunk(self.chunks)]) if self.training else self.module(x)


def wrapped(way: str, module: nn.Sequential, training: Training, devices: list[str]) -> tuple[nn.Module, str, str]:
    """Return the model, and the devices of its input and of its output."""
    if way != "ours":
        model = module if way == "plain" else OneByOne(module, training.chunks)
        return model.to(devices[0]), devices[0], devices[0]
    places = placed(devices, training.partitions)
    balance = balance_by_parameters(module, partitions=training.partitions)
    model = GPipe(module, balance, devices=places, chunks=training.chunks, deferred_batch_norm=True)
    return model, places[0], places[-1]


def rate_at(epoch: float, training: Training, batch: int) -> float:
    """Return a learning rate that grows for a twentieth of the epochs, then falls along a cosine."""
    top = training.rate * batch / training.batches[0]
    warm = training.epochs / 20
    if epoch < warm:
        return top * epoch / warm
    return top * 0.5 * (1 + math.cos(math.pi * (epoch - warm) / (training.epochs - warm)))


def train(way: str, data: Data, training: Training, batch: int, seed: int, devices: list[str]) -> Outcome:
    """Train a ResNet from a seed."""
    torch.manual_seed(seed)
    model, first, last = wrapped(way, resnet((1, 1), 10, width=8), training, devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4, nesterov=True)
    order = torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []
    count = len(data.images) // batch  # The rest would be a smaller mini-batch, so it is left out of this epoch.
    for epoch in range(training.epochs):
        for k, picked in enumerate(torch.randperm(len(data.images), generator=order)[: count * batch].split(batch)):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(epoch + k / count, training, batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.images[picked].to(first)), data.classes[picked].to(last))
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        guesses = [model(images.to(first)).argmax(dim=1).cpu() for images in data.test_images.split(batch)]
    right = torch.cat(guesses) == data.test_classes
    return Outcome(torch.stack(losses).tolist(), float(right.double().mean()))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train each way with each size of mini-batches, from several seeds."""
    training = Training(args.batches, args.epochs)
    torch.set_num_threads(1)
    data = digits()
    ways = [way for way in WAYS if way in args.peers or ("ours" in args.peers and way == "micro-batches")]
    outcomes: dict[tuple[str, int], list[Outcome]] = {}
    progress = Progress(len(ways) * len(training.batches) * args.seeds)
    for way in ways:
        for batch in training.batches:
            for seed in range(args.seeds):
                progress(f"{WAYS[way]}-{batch}, seed {seed}")
                outcome = train(way, data, training, batch, seed, args.devices)
                outcomes.setdefault((way, batch), []).append(outcome)
    return {
        "unit": "share of test images that are classified right",
        **{"data": "digits", "seeds": args.seeds},
        **{name: getattr(training, name) for name in ("chunks", "partitions", "epochs", "rate")},
        "rows": [row_of(way, batch, found, outcomes, training.epochs) for (way, batch), found in outcomes.items()],
    }


def row_of(
    way: str, batch: int, found: list[Outcome], outcomes: dict[tuple[str, int], list[Outcome]], epochs: int
) -> Row:
    """Return the row of an experiment: its accuracies, its curve, and how both differ from other ways."""
    accuracies = [outcome.accuracy for outcome in found]
    row: Row = {"experiment": f"{WAYS[way]}-{batch}", "peer": way, "batch": batch, "accuracies": accuracies}
    row |= {"accuracy": spread(accuracies), **mean_of(accuracies)}
    row["curve"] = [statistics.mean(epoch) for epoch in zip(*(means(outcome.losses, epochs) for outcome in found))]
    if way == "ours":
        if plain := outcomes.get(("plain", batch)):
            pairs = zip(accuracies, (outcome.accuracy for outcome in plain), strict=True)
            row["over plain"] = mean_of([ours - other for ours, other in pairs])
        curves = zip(found, outcomes["micro-batches", batch], strict=True)
        row["off the curve"] = max(
            abs(a - b) for ours, other in curves for a, b in zip(ours.losses, other.losses, strict=True)
        )
    return row


def means(losses: Sequence[float], epochs: int) -> Iterator[float]:
    """Yield the mean loss of each epoch."""
    steps = len(losses) // epochs
    for epoch in range(epochs):
        yield statistics.mean(losses[epoch * steps : (epoch + 1) * steps])


def mean_of(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def transparency(result: dict[str, Any]) -> str:
    def beside(row: Row) -> str:
        over = row.get("over plain")
        return "-" if over is None else f"{over['mean'] * 100:+.2f} ± {over['deviation'] * 100:.2f}"

    columns = {
        **{"experiment": "experiment", "mini-batch": "batch"},
        "accuracy": lambda row: f"{row['mean']:.2%} ± {row['deviation'] * 100:.2f}",
        "lowest": lambda row: f"{row['accuracy']['low']:.2%}",
        "highest": lambda row: f"{row['accuracy']['high']:.2%}",
        "pipeline - plain, points": beside,
    }
    return table_of(result["rows"], columns)


def training_curves(result: dict[str, Any]) -> str:
    """Return a table of the mean loss of each epoch, and of how far the pipeline is off the plain micro-batches."""
    columns: dict[str, Any] = {"experiment": "experiment"}
    for epoch in range(result["epochs"]):
        columns[f"epoch {epoch + 1}"] = lambda row, epoch=epoch: f"{row['curve'][epoch]:.3f}"
    columns["off micro-batches"] = lambda row: f"{row['off the curve']:.1g}" if "off the curve" in row else "-"
    return table_of(result["rows"], columns)
