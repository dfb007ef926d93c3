"""Does a pipeline change what is learned? The accuracy of a ResNet, trained plain and through a pipeline.

A pipeline gives the gradients of the plain model on the same micro-batches. What is left is batch norm, which
normalises each micro-batch by itself. So the same ResNet is trained with the same seeds plain, on whole mini-batches,
and through a pipeline with `deferred_batch_norm=True`, which tracks running statistics of whole mini-batches; each
with three sizes of mini-batches, the learning rate growing with them. torchgpipe asked the same of ResNet-101 on
ImageNet.

    python -m benchmarks.training --only accuracy    # handwritten digits, on the CPU

The digits come with scikit-learn. All random numbers depend on the seed, so on the CPU the figures can be reproduced.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import resnet
from benchmarks.placement import placed
from benchmarks.program import Progress
from benchmarks.records import spread, table_of
from torchgpipe import GPipe
from torchgpipe_balancing import balance_by_parameters

__all__ = ["measure", "transparency"]

PEERS = ("plain", "ours")


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


def wrapped(peer: str, module: nn.Sequential, training: Training, devices: list[str]) -> tuple[nn.Module, str, str]:
    """Return the model, and the devices of its input and of its output."""
    if peer == "plain":
        return module.to(devices[0]), devices[0], devices[0]
    places = placed(devices, training.partitions)
    model = GPipe(
        module,
        balance_by_parameters(module, partitions=training.partitions),
        devices=places,
        chunks=training.chunks,
        deferred_batch_norm=True,
    )
    return model, places[0], places[-1]


def rate_at(epoch: float, training: Training, batch: int) -> float:
    """Return a learning rate that grows for a twentieth of the epochs, then falls along a cosine."""
    top = training.rate * batch / training.batches[0]
    warm = training.epochs / 20
    if epoch < warm:
        return top * epoch / warm
    return top * 0.5 * (1 + math.cos(math.pi * (epoch - warm) / (training.epochs - warm)))


def train(peer: str, data: Data, training: Training, batch: int, seed: int, devices: list[str]) -> float:
    """Return the share of test images that are classified right in the end."""
    torch.manual_seed(seed)
    model, first, last = wrapped(peer, resnet((1, 1), 10, width=8), training, devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4, nesterov=True)
    order = torch.Generator().manual_seed(seed)
    count = len(data.images) // batch  # The rest would be a smaller mini-batch, so it is left out of this epoch.
    for epoch in range(training.epochs):
        for k, picked in enumerate(torch.randperm(len(data.images), generator=order)[: count * batch].split(batch)):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(epoch + k / count, training, batch)
            optimizer.zero_grad()
            output = model(data.images[picked].to(first))
            torch.autograd.backward(F.cross_entropy(output, data.classes[picked].to(last)))
            optimizer.step()
    model.eval()
    with torch.no_grad():
        guesses = [model(images.to(first)).argmax(dim=1).cpu() for images in data.test_images.split(batch)]
    return float((torch.cat(guesses) == data.test_classes).double().mean())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train both ways with each size of mini-batches, from several seeds."""
    training = Training(args.batches, args.epochs)
    torch.set_num_threads(1)
    data = digits()
    peers = [name for name in PEERS if name in args.peers]
    rows: list[dict[str, Any]] = []
    progress = Progress(len(peers) * len(training.batches) * args.seeds)
    for peer in peers:
        for batch in training.batches:
            name = f"{'plain' if peer == 'plain' else 'pipeline'}-{batch}"
            accuracies = []
            for seed in range(args.seeds):
                progress(f"{name}, seed {seed}")
                accuracies.append(train(peer, data, training, batch, seed, args.devices))
            figures = {"accuracies": accuracies, "accuracy": spread(accuracies)}
            rows.append({"experiment": name, "peer": peer, "batch": batch, **figures, **mean_of(accuracies)})
    return {
        "unit": "share of test images that are classified right",
        **{"data": "digits", "seeds": args.seeds},
        **{name: getattr(training, name) for name in ("chunks", "partitions", "epochs", "rate")},
        "rows": rows,
        "differences": differences(rows),
    }


def mean_of(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the pipeline gains or loses, seed by seed."""
    by_batch = {(row["peer"], row["batch"]): row for row in rows}
    gained = []
    for (peer, batch), row in by_batch.items():
        if peer == "ours" and ("plain", batch) in by_batch:
            pairs = zip(row["accuracies"], by_batch["plain", batch]["accuracies"], strict=True)
            gained.append({"batch": batch, **mean_of([ours - plain for ours, plain in pairs])})
    return gained


def transparency(result: dict[str, Any]) -> str:
    gained = {row["batch"]: row for row in result["differences"]}

    def beside(row: dict[str, Any]) -> str:
        difference = gained.get(row["batch"]) if row["peer"] == "ours" else None
        return "-" if difference is None else f"{difference['mean'] * 100:+.2f} ± {difference['deviation'] * 100:.2f}"

    columns = {
        **{"experiment": "experiment", "mini-batch": "batch"},
        "accuracy": lambda row: f"{row['mean']:.2%} ± {row['deviation'] * 100:.2f}",
        "lowest": lambda row: f"{row['accuracy']['low']:.2%}",
        "highest": lambda row: f"{row['accuracy']['high']:.2%}",
        "pipeline - plain, points": beside,
    }
    return table_of(result["rows"], columns)
