"""Bytes copied between devices for the skips of a U-Net: through portals, and along every layer in tuples.

The skip of the first layer goes to one of the last. A portal copies it once, from its device to the one where it is
needed, and its gradient once back. Without portals a Sequential has to hand it on from layer to layer, so it is
copied to every device on the way. Both ways run the same layers, and have to give the same scores and gradients as
the plain model on the same micro-batches.

The bytes are counted as they are copied, not estimated; `examples/traffic.py` says how. They depend on the model
and on how it is split, not on the machine. On the CPU the devices are called cpu:0, cpu:1, ... and tensors are
copied between them as between GPUs.

    python -m benchmarks.skips                                  # -> results/skips.json and skips.svg, in seconds
    python -m benchmarks.skips --devices cuda:0 cuda:1 cuda:2   # the same on GPUs
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers import CHECKOUT
from benchmarks.pictures import new_figure
from benchmarks.program import Command
from benchmarks.records import table

PARTITIONS = (2, 4, 8)
WAYS = ("portals", "tuples")


def gradients(model: nn.Sequential) -> list[Tensor]:
    """Take the gradients off the model."""
    taken = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return taken


def plain_step(model: nn.Sequential, images: Tensor, chunks: int) -> tuple[Tensor, list[Tensor]]:
    scores = torch.cat([model(part) for part in images.chunk(chunks)])
    scores.square().mean().backward()
    return scores.detach().cpu(), gradients(model)


def farthest(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of its tensor."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(these, those, strict=True))


def measure(options: argparse.Namespace, devices: list[str]) -> dict[str, Any]:
    """Count both ways over these devices, and compare them with the plain model."""
    from unet import counted_step, draw_images, unet, without_portals

    torch.manual_seed(0)
    model = unet(options.depth, options.width)
    images, _ = draw_images(options.batch, options.size, torch.Generator().manual_seed(0))
    scores, grads = plain_step(model.to(devices[0]), images.to(devices[0]), options.chunks)

    balance = [len(part) for part in torch.arange(len(model)).tensor_split(len(devices))]
    row: dict[str, Any] = {"balance": balance, "devices": devices}
    for way, layers, input in zip(WAYS, (model, without_portals(model)), (images, (images,))):
        output, copied = counted_step(layers, input, balance, devices, options.chunks, "except_last")
        difference = farthest([output.cpu(), *gradients(model)], [scores, *grads])
        # On the CPU the same kernels see the same micro-batches.
        allowed = 1e-3 if any(device != "cpu" for device in {torch.device(name).type for name in devices}) else 0.0
        if not difference <= allowed:  # or not a number
            raise SystemExit(f"{way} over {devices} differ by {difference} from the plain model")
        row[way] = {
            "copied": [[source, target, count] for (source, target), count in sorted(copied.items())],
            "total": copied.total(),
            "busiest": max(copied.values(), default=0),
            "difference": difference,
        }
    return row


def copied_of(row: dict[str, Any], way: str) -> Counter[tuple[int, int]]:
    return Counter({(source, target): count for source, target, count in row[way]["copied"]})


def skips(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        figures = [f"{row[way][what] / 1e6:.2f}" for what in ("total", "busiest") for way in WAYS]
        over = row["tuples"]["total"] / max(row["portals"]["total"], 1)
        lines.append([len(row["balance"]), *figures, f"{over:.2f}"])
    header = [f"{what}, {way}" for what in ("all", "busiest pair") for way in WAYS]
    return table(lines, ["partitions", *header, "tuples / portals"])


def pairs(row: dict[str, Any]) -> str:
    """Return a table of what goes from each partition to each other."""
    forward = list(combinations(range(len(row["balance"])), 2))
    ways = [copied_of(row, way) for way in WAYS]
    found = [pair for pair in forward + [(b, a) for a, b in forward] if any(pair in copied for copied in ways)]
    lines = [[f"from {a} to {b}", *(f"{copied[a, b] / 1e6:.2f}" for copied in ways)] for a, b in found]
    return table(lines, ["partitions", *WAYS])


def middle(result: dict[str, Any]) -> dict[str, Any]:
    """Return the row that is shown pair by pair."""
    row: dict[str, Any] = result["rows"][len(result["rows"]) // 2]
    return row


def show(result: dict[str, Any]) -> dict[str, str]:
    row = middle(result)
    return {
        f"MB copied in a step, layers {row['balance']}": pairs(row),
        "MB copied in a step": skips(result),
    }


def draw(result: dict[str, Any]) -> Any:
    """Draw what goes from each partition to each other, and how the sum grows with the number of partitions."""
    rows, row = result["rows"], middle(result)
    figure = new_figure(12 if len(rows) > 1 else 8.5, 4.2)
    axes = figure.subplots(1, 3 if len(rows) > 1 else 2)
    largest = max(row[way]["busiest"] for way in WAYS) / 1e6
    for way, place in zip(WAYS, axes):
        draw_matrix(place, copied_of(row, way), len(row["balance"]), largest)
        place.set_title(f"{way}: {row[way]['total'] / 1e6:.1f} MB")
    if len(rows) > 1:
        draw_totals(axes[2], rows)
    figure.suptitle("Copied in a training step of a U-Net, in MB: forward above the diagonal, backward below it")
    return figure


def draw_matrix(place: Any, copied: Counter[tuple[int, int]], n: int, largest: float) -> None:
    megabytes = np.array([[copied[j, k] / 1e6 for k in range(n)] for j in range(n)])
    place.imshow(np.where(megabytes > 0, megabytes, np.nan), cmap="YlGnBu", vmin=0, vmax=1.15 * largest)
    for (j, k), value in np.ndenumerate(megabytes):
        if value > 0:
            color = "white" if value > 0.6 * largest else "black"
            place.text(k, j, f"{value:.1f}", ha="center", va="center", color=color, fontsize=11)
    place.set(xticks=range(n), yticks=range(n), xlabel="to partition", ylabel="from partition")
    between = np.arange(n + 1) - 0.5
    place.set_xticks(between, minor=True)
    place.set_yticks(between, minor=True)
    place.grid(which="minor", color="lightgray", linewidth=1)
    place.tick_params(which="both", length=0)
    place.spines[:].set_visible(False)


def draw_totals(place: Any, rows: list[dict[str, Any]]) -> None:
    for way, color, shift in zip(WAYS, ("#41b6c4", "#253494"), (-0.2, 0.2)):
        heights = [row[way]["total"] / 1e6 for row in rows]
        bars = place.bar(np.arange(len(rows)) + shift, heights, 0.38, color=color, label=way)
        place.bar_label(bars, fmt="%.0f", padding=2)
    place.set(xticks=range(len(rows)), xticklabels=[len(row["balance"]) for row in rows], yticks=[])
    place.set(xlabel="partitions", title="all pairs together, MB")
    place.spines[["top", "left", "right"]].set_visible(False)
    place.legend(frameon=False, loc="upper left")


def main() -> None:
    command = Command("skips", __doc__, show=show, draw=draw)
    command.add("--devices", nargs="+", help="one for each partition, by default 2, 4 and 8 on the CPU")
    command.add("--depth", type=int, default=4, help="how often the U-Net halves the size")
    command.add("--width", type=int, default=16, help="channels at full size")
    command.add("--size", type=int, default=128, help="height and width of the images")
    command.add("--batch", type=int, default=8, help="images in a mini-batch")
    command.add("--chunks", type=int, default=4, help="micro-batches")
    options = command.parse()

    torch.set_num_threads(1)
    sys.path.append(str(CHECKOUT / "examples"))
    asked = [options.devices] if options.devices else [[f"cpu:{j}" for j in range(n)] for n in PARTITIONS]
    rows = [measure(options, devices) for devices in asked]
    shape = {name: getattr(options, name) for name in ("depth", "width", "size", "batch", "chunks")}
    command.finish(unit="bytes in a step", **shape, rows=rows)


if __name__ == "__main__":
    main()
