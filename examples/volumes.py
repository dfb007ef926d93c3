"""Train a 3D U-Net on volumes, one at a time, and accumulate their gradients: in a pipeline, and without one.

    python examples/volumes.py                      # in less than a minute on two CPU cores
    python examples/volumes.py --recompute --window 8

One volume is all that fits a card, so a batch has one row, which no pipeline can split. But gradients are accumulated
over a window of volumes, and those are the micro-batches of a pipeline: one `step` for a window, in which several
volumes are on different devices at the same time. Volumes of a window differ in size here. The instance norms see one
volume at a time, as without a pipeline, so both learn the same. The script prints their losses side by side.

The model learns to tell balls from rods among noise, voxel by voxel. The volumes are drawn from a seed, so nothing is
downloaded. Scores come at each size, largest first, and all of them count in the loss (deep supervision).

The example uses all accelerators of the machine. On a CPU the partitions share the cores.
"""

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe
from torchgpipe import MicroBatches, windows

CLASSES = ("background", "ball", "rod")


def convolutions(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels, by in ((inputs, stride), (outputs, 1)):
        layers += [nn.Conv3d(channels, outputs, 3, by, padding=1), nn.InstanceNorm3d(outputs, affine=True)]
        layers.append(nn.LeakyReLU(0.01, inplace=True))
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """From volumes (batch, 1, depth, height, width) to scores of each voxel's class, in training at each size.

    Args:
        channels: the channels at each size; each size has half the edges of the one before
    """

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        levels = range(len(channels))
        self.downs = nn.ModuleList(
            [convolutions(channels[k - 1] if k else 1, channels[k], stride=2 if k else 1) for k in levels]
        )
        ups = [*levels][-2::-1]
        self.enlarge = nn.ModuleList([nn.ConvTranspose3d(channels[k + 1], channels[k], 2, stride=2) for k in ups])
        self.ups = nn.ModuleList([convolutions(2 * channels[k], channels[k]) for k in ups])
        self.heads = nn.ModuleList([nn.Conv3d(channels[k], len(CLASSES), 1) for k in ups])

    def forward(self, x: Tensor) -> Any:
        skips, scores = [], []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        skips.pop()
        for enlarge, up, head in zip(self.enlarge, self.ups, self.heads):
            x = up(torch.cat([enlarge(x), skips.pop()], dim=1))
            scores.append(head(x))
        return scores[::-1] if self.training else scores[-1]


def dice(probabilities: Tensor, classes: Tensor) -> Tensor:
    """Return how much probabilities (batch, 3, ...) and classes (batch, ...) overlap, by row and class."""
    truth = F.one_hot(classes, len(CLASSES)).movedim(-1, 1).to(probabilities.dtype)
    both, all_of_both = (probabilities * truth).sum([2, 3, 4]), (probabilities + truth).sum([2, 3, 4])
    return (2 * both + 1) / (all_of_both + 1)


def loss_fn(scores: Any, classes: Tensor) -> Tensor:
    """Return cross entropy and the loss of Dice; scores of half the size weigh half as much."""
    total = torch.zeros((), device=classes.device)
    for k, of_size in enumerate(scores if isinstance(scores, list) else [scores]):
        at = classes[:, :: 2**k, :: 2**k, :: 2**k]
        total = total + (F.cross_entropy(of_size, at) + 1 - dice(of_size.softmax(dim=1), at).mean()) / 2**k
    return total


def draw_volume(options: argparse.Namespace, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a volume (1, 1, depth, height, width) with balls and rods, and the classes of its voxels."""
    step = 2 ** (options.depth - 1)
    edges = torch.randint(max(1, options.size // step // 2), options.size // step + 1, (3,), generator=draw) * step
    points = torch.stack(torch.meshgrid(*[torch.arange(int(edge)) for edge in edges], indexing="ij"), dim=-1)
    classes = torch.zeros(points.shape[:3], dtype=torch.long)
    for _ in range(4):
        apart = points - torch.rand(3, generator=draw) * edges
        if torch.rand((), generator=draw) < 0.5:
            classes[apart.square().sum(-1) < (options.size / 6) ** 2] = 1
        else:
            axis = F.normalize(torch.randn(3, generator=draw), dim=0)
            along = (apart * axis).sum(-1)
            across = apart.square().sum(-1) - along.square()
            classes[(along.abs() < options.size / 3) & (across < (options.size / 10) ** 2)] = 2
    volume = (classes > 0) + 0.5 * torch.randn(classes.shape, generator=draw)
    return volume[None, None], classes[None]


def train(model: nn.Module, volumes: list[tuple[Tensor, Tensor]], options: argparse.Namespace) -> list[float]:
    """Train in a loop that accumulates, and return the losses of its steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for window in windows(volumes, options.window):
        total = 0.0
        for volume, classes in window:
            loss: Any = loss_fn(model(volume), classes) / len(window)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train_in_pipeline(model: Any, volumes: list[tuple[Tensor, Tensor]], options: argparse.Namespace) -> list[float]:
    """Train in a pipeline, and return the losses of its steps."""
    sample, target = map(MicroBatches, zip(*volumes[:2]))
    # The layers of the largest size have most of the activations.
    recomputed = ["downs.0", f"ups.{options.depth - 2}"] if options.recompute else False
    torchgpipe.pipelined(
        model, sample, target=target, loss_fn=loss_fn, schedule=options.schedule, checkpoint=recomputed
    )
    print(f"As a pipeline:\n{model.layout}\n")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for window in windows(volumes, options.window):
        # Volumes weigh the same, whatever their sizes.
        inputs, targets = zip(*window)
        losses.append(model.step(MicroBatches(inputs, weights=[1] * len(window)), target=MicroBatches(targets)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@torch.no_grad()
def overlap(model: Any, volumes: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the mean Dice of each class."""
    model.eval()
    found = [(model(volume).argmax(1), classes) for volume, classes in volumes]
    of_each = [dice(F.one_hot(seen, len(CLASSES)).movedim(-1, 1).float(), at.to(seen.device)) for seen, at in found]
    return [round(value, 6) for value in torch.cat(of_each).mean(0).tolist()]


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    plain = UNet([options.width * 2**level for level in range(options.depth)])
    draw = torch.Generator().manual_seed(options.seed)
    volumes = [draw_volume(options, draw) for _ in range(options.steps * options.window)]
    held_out = [draw_volume(options, draw) for _ in range(8)]
    sizes = [volume.numel() for volume, _ in volumes]
    print(f"{len(volumes)} volumes of {min(sizes)} to {max(sizes)} voxels, {options.window} in a step\n", flush=True)
    model = copy.deepcopy(plain)
    ours, theirs = train_in_pipeline(model, volumes, options), train(plain, volumes, options)
    print(f"{'steps':>12}{'pipeline':>14}{'plain':>14}{'difference':>14}")
    part = max(1, options.steps // 10)
    for first in range(0, options.steps, part):
        steps = slice(first, min(first + part, options.steps))
        one, other = (sum(losses[steps]) / len(losses[steps]) for losses in (ours, theirs))
        print(f"{f'{steps.start}-{steps.stop - 1}':>12}{one:>14.6f}{other:>14.6f}{one - other:>14.6f}")
    print("\nDice on volumes that were held out:")
    for name, one, other in zip(CLASSES, overlap(model, held_out), overlap(plain, held_out)):
        print(f"{name:>12}{one:>14.6f}{other:>14.6f}{one - other:>14.6f}")


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a 3D U-Net on volumes, one at a time, and accumulate their gradients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--depth", type=int, default=3, help="sizes, each with half the edges of the one before")
    add("--width", type=int, default=8, help="channels at full size; twice as many at each half")
    add("--size", type=int, default=24, help="the longest edge of a volume")
    add("--window", type=int, default=4, help="volumes in a step")
    add("--steps", type=int, default=40, help="training steps")
    add("--schedule", default="1F1B", help="order of forward and backward in a step")
    add("--recompute", action="store_true", help="run the layers of the largest size again at backward")
    add("--seed", type=int, default=0, help="seed of weights and volumes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The tensors are small: more threads would wait for each other.
    main()
