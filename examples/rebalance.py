"""Rebalance a pipeline during training, when its partitions no longer take the same time.

The last layer of a network learns to classify gratings by their angle; the layers before, convolutions and then dense
layers, are frozen. The first images are small, and the partitions are balanced for them. Then the images become
larger: the convolutions take nine times as long, the dense layers as long as before, and one partition waits for the
other. The times of the partitions, measured during training, show this. So the layers are unwrapped and wrapped again
with a new balance, and training continues with the same parameters and the same optimizer.

    python examples/rebalance.py                 # some seconds on two CPU cores
    python examples/rebalance.py --partitions 4

The example uses the accelerators of the machine. If there are too few, each partition has a CPU thread.
"""

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from torchgpipe import GPipe
from torchgpipe_balancing import profile

CLASSES = 12


def build(width: int, features: int) -> nn.Sequential:
    """Build a model from images (batch, 1, height, width) to scores (batch, CLASSES). The last layer is trained."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 5, padding=2), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.LayerNorm(16 * width), nn.Linear(16 * width, features)]
    for _ in range(3):
        layers += [nn.ReLU(), nn.Linear(features, features)]
    fixed = nn.Sequential(*layers).requires_grad_(False)
    return fixed.append(nn.LayerNorm(features)).append(nn.Linear(features, CLASSES))


def gratings(batch: int, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw images of waves with noise, and the class of each image, which is the angle of its waves."""
    classes = torch.randint(CLASSES, (batch,), generator=draw)
    angles = (classes * math.pi / CLASSES)[:, None, None]
    places = torch.arange(size, dtype=torch.float32)
    waves = torch.sin(0.8 * (places[:, None] * angles.cos() + places * angles.sin()))
    return (waves + 0.5 * torch.randn(batch, size, size, generator=draw))[:, None], classes


def wrap(module: nn.Sequential, balance: list[int], options: argparse.Namespace) -> GPipe:
    enough = torch.accelerator.device_count() >= len(balance)
    devices = None if enough else [f"cpu:{j}" for j in range(len(balance))]
    return GPipe(module, balance, devices=devices, chunks=options.chunks)


def measure(module: nn.Sequential, size: int, options: argparse.Namespace) -> list[int]:
    """Return the best balance for images of a size."""
    images, _ = gratings(max(options.batch // options.chunks, 1), size, torch.Generator().manual_seed(0))
    report = profile(module, images, timeout=options.timeout)
    if options.table:
        print(f"\n{report}\n")
    return report.balance(options.partitions)


@contextmanager
def stopwatches(model: GPipe) -> Iterator[list[float]]:
    """Sum the seconds of each partition for forward and recomputation; backward takes little, as layers are frozen.

    The clock is read after the device has finished, which slows an accelerator a little.
    """
    seconds = [0.0] * len(model.partitions)
    handles = []
    for j, (partition, device) in enumerate(zip(model.partitions, model.devices, strict=True)):

        def now(device: torch.device = device) -> float:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            return time.perf_counter()

        def start(*_: Any, j: int = j, now: Any = now) -> None:
            seconds[j] -= now()

        def stop(*_: Any, j: int = j, now: Any = now) -> None:
            seconds[j] += now()

        handles += [partition.register_forward_pre_hook(start), partition.register_forward_hook(stop)]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def train(
    model: GPipe, optimizer: torch.optim.Optimizer, size: int, draw: torch.Generator, options: argparse.Namespace
) -> list[float]:
    """Train on images of a size, and return the median seconds of each partition in a step."""
    times: list[float] = []
    loads: list[list[float]] = []
    description = f"{size} px, balance {model.balance}"
    with tqdm(desc=description, total=options.steps * options.batch, unit=" images", leave=False) as progress:
        for _ in range(options.steps):
            images, classes = gratings(options.batch, size, draw)
            start = time.perf_counter()
            with stopwatches(model) as seconds:
                scores = model(images.to(model.devices[0]))
                loss = F.cross_entropy(scores, classes.to(scores.device))
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            value = loss.item()  # waits for the device
            times.append(time.perf_counter() - start)
            loads.append(seconds)
            progress.set_postfix(loss=f"{value:.3f}", refresh=False)
            progress.update(options.batch)

    def median(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    taken = [median(column) for column in map(list, zip(*loads, strict=True))]
    shown = " + ".join(f"{seconds * 1e3:.0f}" for seconds in taken)
    print(f"{description}: {shown} ms in the partitions, {median(times) * 1e3:.0f} ms a step, loss {value:.3f}")
    return taken


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train through a pipeline, and rebalance it during training.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--partitions", type=int, default=2, help="number of partitions")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--sizes", type=int, nargs="+", default=[24, 72], help="pixels of the images in each phase")
    add("--steps", type=int, default=12, help="mini-batches in a phase")
    add("--batch", type=int, default=32, help="images in a mini-batch")
    add("--width", type=int, default=16, help="channels of the convolutions")
    add("--features", type=int, default=1024, help="length of the vectors between the dense layers")
    add("--tolerance", type=float, default=1.5, help="slowest partition over the mean at which to rebalance")
    add("--timeout", type=float, default=0.5, help="seconds for profiling the layers")
    add("--table", action="store_true", help="print the profile of the layers")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    if torch.accelerator.device_count() < options.partitions:
        torch.set_num_threads(1)  # so that partitions do not compete for cores
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    module = build(options.width, options.features)
    model = wrap(module, measure(module, options.sizes[0], options), options)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for size in options.sizes:
        taken = train(model, optimizer, size, draw, options)
        slowest = max(taken) * len(taken) / sum(taken)
        if slowest < options.tolerance:
            continue
        print(f"The slowest partition takes {slowest:.2f} times the mean of all. Rebalancing.")
        module = model.unwrap()
        model = wrap(module, measure(module, size, options), options)
        # Moves Adam's state of each parameter to the parameter's new device.
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, size, draw, options)


if __name__ == "__main__":
    main()
