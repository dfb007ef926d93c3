"""Train a U-Net through a pipeline, with portals for its skips, then without one, and compare the results.

A U-Net halves an image step by step and doubles it again. At each size, a skip connects the way down with the way up.
In a pipeline these skips are long: the first one goes from the first partition to the last. ``Down`` stashes a skip and
``Up`` pops it, and a portal copies the skip straight from device to device.

    python examples/unet.py                    # both, in about a minute on two CPU cores
    python examples/unet.py --pipeline         # only through the pipeline
    python examples/unet.py --balance 1 3 3 1  # layers in each partition

The model learns to tell discs, bars and rings of any colour from each other, pixel by pixel. The images are drawn from
a seed, so nothing is downloaded. In a pipeline, batch norms see one micro-batch at a time. The plain model gets the
same micro-batches one after the other, so both compute the same.

At the end the example counts the bytes that are copied between the partitions in a step, and compares them with the
same model without portals, in which every layer passes on all open skips in a tuple.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import torch
from language_model import devices_for
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from traffic import traffic

from torchgpipe import GPipe
from torchgpipe.skip import Namespace, Skippable, pop, skippable, stash

CLASSES = ("background", "disc", "bar", "ring")

# ---- The model. A pipeline may cut it between any two layers of the Sequential.


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
        # Micro-batches are small, so the running statistics are taken over many of them.
        layers += [nn.BatchNorm2d(outputs, momentum=0.02), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


@skippable(stash=["skip"])
class Down(Skippable, nn.Module):
    """Convolve an image (batch, inputs, height, width), stash the result, and return it at half the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.look = convolutions(inputs, outputs)

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        x = self.look(x)
        yield stash("skip", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["skip"])
class Up(Skippable, nn.Module):
    """Double the size of an image (batch, inputs, height, width), and convolve it with the skip of that size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.look = convolutions(2 * outputs, outputs)

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        skip = yield pop("skip")
        return self.look(torch.cat([skip, self.enlarge(x)], dim=1))


def unet(depth: int, width: int) -> nn.Sequential:
    """Return a model from images (batch, 3, size, size) to scores of each pixel's class (batch, 4, size, size).

    Args:
        depth: how often the size is halved
        width: channels at full size; twice as many at each half
    """
    channels = [3, *(width * 2**level for level in range(depth + 1))]
    # All skips have one name. A namespace for each level pairs a Down with its Up.
    levels = [Namespace() for _ in range(depth)]
    downs = [Down(channels[k], channels[k + 1]).isolate(levels[k]) for k in range(depth)]
    ups = [Up(channels[k + 2], channels[k + 1]).isolate(levels[k]) for k in reversed(range(depth))]
    return nn.Sequential(*downs, convolutions(*channels[-2:]), *ups, nn.Conv2d(width, len(CLASSES), 1))


# ---- The same model without portals. Every layer takes a tuple, (image, *open skips), and returns one.


class DownAlong(nn.Module):
    def __init__(self, down: Any) -> None:
        super().__init__()
        self.look = down.look

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *skips = inputs
        x = self.look(x)
        return F.max_pool2d(x, 2), *skips, x


class UpAlong(nn.Module):
    def __init__(self, up: Any) -> None:
        super().__init__()
        self.enlarge, self.look = up.enlarge, up.look

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *skips, skip = inputs
        return self.look(torch.cat([skip, self.enlarge(x)], dim=1)), *skips


class Along(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *skips = inputs
        return self.layer(x), *skips


def without_portals(model: nn.Sequential) -> nn.Sequential:
    """Return a U-Net with the same layers and parameters that passes its skips on from layer to layer."""
    kinds: dict[type[nn.Module], Callable[[Any], nn.Module]] = {Down: DownAlong, Up: UpAlong}
    return nn.Sequential(*(kinds.get(type(layer), Along)(layer) for layer in model))


# ---- The images.


def draw_images(count: int, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw images (count, 3, size, size) of overlapping shapes, and the classes (count, size, size)."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(count, *shape, 1, 1).uniform_(low, high, generator=draw)

    y, x = torch.meshgrid(torch.arange(size) / size, torch.arange(size) / size, indexing="ij")
    images = uniform(0, 0.3, 3) + uniform(-0.1, 0.1, 1) * x + uniform(-0.1, 0.1, 1) * y
    classes = torch.zeros(count, size, size, dtype=torch.long)
    for _ in range(4):
        angle, radius = uniform(0, torch.pi), uniform(0.13, 0.22)
        right, down = x - uniform(0, 1), y - uniform(0, 1)
        along, across = right * angle.cos() + down * angle.sin(), down * angle.cos() - right * angle.sin()
        distance = right.hypot(down) / radius
        disc = distance < 1
        bar = (along.abs() < 1.3 * radius) & (across.abs() < uniform(0.2, 0.4) * radius)
        ring = disc & (distance > uniform(0.5, 0.7))

        kind = torch.randint(1, len(CLASSES), (count, 1, 1), generator=draw)
        covered = torch.where(kind == 1, disc, torch.where(kind == 2, bar, ring))
        classes = torch.where(covered, kind, classes)
        images = torch.where(covered[:, None], uniform(0.4, 1, 3), images)
    return images + 0.1 * torch.randn(images.shape, generator=draw), classes


def intersections_over_unions(predicted: Tensor, classes: Tensor) -> list[float]:
    """Return the intersection over union of true and predicted pixels for each class."""
    ious = []
    for k in range(len(CLASSES)):
        is_there, is_seen = classes == k, predicted == k
        ious.append(((is_there & is_seen).sum() / (is_there | is_seen).sum().clamp(min=1)).item())
    return ious


# ---- Training.


@dataclass
class Run:
    """The results of a training run."""

    name: str
    losses: list[float]  # one for each step
    predicted: Tensor  # the classes of the held-out images


def build(options: argparse.Namespace, pipeline: bool) -> nn.Module:
    """Build the same model with or without a pipeline, on its devices."""
    torch.manual_seed(options.seed)
    model = unet(options.depth, options.width)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters in {len(model)} layers"
    if pipeline:
        balance = balance_of(options, model)
        devices = options.devices or devices_for(len(balance))
        gpipe = GPipe(model, balance, devices=devices, chunks=options.chunks, checkpoint=options.checkpoint)
        print(f"{size}, {balance} of them on {[str(device) for device in gpipe.devices]}")
        return gpipe

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(options.devices[0]) if options.devices else accelerator or torch.device("cpu")
    print(f"{size}, all on {str(device)!r}")
    return model.to(device)


def balance_of(options: argparse.Namespace, model: nn.Sequential) -> list[int]:
    """Return the balance of the options, or one with about the same number of layers in each partition."""
    if options.balance:
        return list(options.balance)
    devices = len(options.devices or []) or torch.accelerator.device_count() or 4
    partitions = options.partitions or min(devices, len(model))
    return [len(part) for part in torch.arange(len(model)).tensor_split(partitions)]


def train(options: argparse.Namespace, pipeline: bool, held_out: Tensor) -> Run:
    model = build(options, pipeline)
    first, last = (list(model.parameters())[k].device for k in (0, -1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps, pct_start=0.1)
    weight = torch.tensor([0.3, 1, 1, 1], device=last)  # three quarters of the pixels are background

    name, losses = "pipeline" if pipeline else "plain", []
    draw = torch.Generator().manual_seed(options.seed)
    with tqdm(desc=name, total=options.steps * options.batch, unit=" images") as progress:
        for _ in range(options.steps):
            images, classes = draw_images(options.batch, options.size, draw)
            images, classes = images.to(first), classes.to(last)
            # The pipeline splits the mini-batch itself.
            scores = model(images) if pipeline else torch.cat([model(part) for part in images.chunk(options.chunks)])
            loss = F.cross_entropy(scores, classes, weight)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            losses.append(loss.item())
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            progress.update(options.batch)

    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(part.to(first)).argmax(dim=1).cpu() for part in held_out.split(16)])
    return Run(name, losses, predicted)


# ---- Traffic between the partitions.


def counted_step(
    layers: nn.Sequential,
    input: Any,
    balance: Sequence[int],
    devices: Sequence[str],
    chunks: int,
    checkpoint: Literal["always", "except_last", "never"],
) -> tuple[Tensor, Counter[tuple[int, int]]]:
    """Run a step, and return the scores, and the bytes that were copied from each partition to each other one."""
    pipeline = GPipe(layers, balance, devices=devices, chunks=chunks, checkpoint=checkpoint)
    with traffic(pipeline) as copied:
        output = pipeline(input)
        scores: Tensor = output if isinstance(output, Tensor) else output[0]
        scores.square().mean().backward()
    return scores.detach(), copied


def print_traffic(options: argparse.Namespace) -> None:
    """Count and print copied bytes on the CPU; they are the same on any devices."""
    model = unet(options.depth, options.width)
    images, _ = draw_images(options.batch, options.size, torch.Generator().manual_seed(options.seed))
    balance = balance_of(options, model)
    devices = [f"cpu:{j}" for j in range(len(balance))]
    copied = []
    for layers, input in ((model, images), (without_portals(model), (images,))):
        copied.append(counted_step(layers, input, balance, devices, options.chunks, options.checkpoint)[1])

    print("\nCopied between the partitions in a step, forward and backward, in MB:")
    print("".join(f"{name:>16}" for name in ("", "portals", "tuples")))
    for j, k in combinations(range(len(balance)), 2):
        both = [counts[j, k] + counts[k, j] for counts in copied]
        print(f"{f'{j} and {k}':>16}" + "".join(f"{count / 1e6:>16.3f}" for count in both))
    print(f"{'all':>16}" + "".join(f"{counts.total() / 1e6:>16.3f}" for counts in copied))


# ---- Output.


def print_scores(runs: list[Run], classes: Tensor) -> None:
    """Print intersections over unions for each run, and for a prediction without shapes."""
    columns = {"no shapes": torch.zeros_like(classes), **{run.name: run.predicted for run in runs}}
    table = [intersections_over_unions(predicted, classes) for predicted in columns.values()]
    rows = [(name, list(row)) for name, row in zip(CLASSES, zip(*table))]
    rows.append(("mean IoU", [sum(column) / len(column) for column in table]))
    print("".join(f"{name:>16}" for name in ["", *columns, "difference"[: 10 * len(runs) - 10]]))
    for name, row in rows:
        apart = [abs(row[1] - row[2])] if len(runs) == 2 else []
        print(f"{name:>16}" + "".join(f"{x:>16.6f}" for x in row + apart))
    if len(runs) == 2:
        apart = [abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses)]
        print(f"The losses of the {len(apart)} steps differ by at most {max(apart):.1e}.")


def draw_predictions(images: Tensor, classes: Tensor, runs: list[Run], path: Path, count: int = 10) -> None:
    """Draw some images, and below them the true and the predicted classes."""
    rows = {"image": images, "truth": classes, **{run.name: run.predicted for run in runs}}
    colors = ListedColormap(["#22223b", "#f2b134", "#3fa7d6", "#ee6352"])
    figure = Figure(figsize=(1.3 * count, 1.3 * len(rows) + 0.8), layout="constrained")
    axes = figure.subplots(len(rows), count, squeeze=False)
    for (name, pictures), line in zip(rows.items(), axes):
        line[0].set_ylabel(name, fontsize=12)
        for picture, place in zip(pictures, line):
            # Colors are the last dimension of what is drawn.
            shown = picture.permute(1, 2, 0).clamp(0, 1) if picture.ndim == 3 else picture
            place.imshow(shown.numpy(), cmap=colors, vmin=0, vmax=len(CLASSES) - 1, interpolation="nearest")
            place.set(xticks=[], yticks=[])
            place.spines[:].set_visible(False)
    labels = [Patch(color=colors(k), label=name) for k, name in enumerate(CLASSES)]
    figure.legend(handles=labels, loc="outside lower center", ncols=len(CLASSES), frameon=False)
    mean = [sum(intersections_over_unions(run.predicted, classes)) / len(CLASSES) for run in runs]
    scores = ", ".join(f"{run.name} {score:.3f}" for run, score in zip(runs, mean))
    figure.suptitle(f"Shapes that a U-Net has not seen before (mean IoU: {scores})")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a U-Net through a pipeline, then without one, and compare the predictions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pipeline", action="store_true", help="train only through the pipeline")
    which.add_argument("--plain", action="store_true", help="train only the plain model")

    add = parser.add_argument_group("the pipeline").add_argument
    add("--balance", type=int, nargs="+", help="layers in each partition, by default about the same number")
    add("--partitions", type=int, default=0, help="0 for one per device, or four without accelerators")
    add("--devices", nargs="+", help="devices of the partitions, by default all accelerators, or the CPU")
    add("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    add("--checkpoint", default="except_last", choices=["always", "except_last", "never"], help="what to recompute")

    add = parser.add_argument_group("the model").add_argument
    add("--depth", type=int, default=3, help="how often the size is halved")
    add("--width", type=int, default=8, help="channels at full size")

    add = parser.add_argument_group("training").add_argument
    add("--size", type=int, default=32, help="height and width of the images")
    add("--steps", type=int, default=300, help="number of training steps")
    add("--batch", type=int, default=16, help="images in a mini-batch")
    add("--lr", type=float, default=1e-2, help="highest learning rate")
    add("--seed", type=int, default=0, help="seed of the initial weights and the images")

    add = parser.add_argument_group("the results").add_argument
    add("--out", type=Path, default=Path("demo/unet.png"), help="where to draw the predictions")
    options = parser.parse_args(arguments)
    if options.size % 2**options.depth:
        parser.error(f"--size must be a multiple of {2**options.depth} to be halved {options.depth} times")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    held_out, classes = draw_images(128, options.size, torch.Generator().manual_seed(options.seed + 1))
    which = [True] if options.pipeline else [False] if options.plain else [True, False]
    runs = [train(options, pipeline, held_out) for pipeline in which]

    draw_predictions(held_out, classes, runs, options.out)
    print("\nIntersection over union on images that were held out:")
    print_scores(runs, classes)
    print_traffic(options)
    print(f"\nThe pictures are in {options.out}.")


if __name__ == "__main__":
    main()
