"""Bytes copied between devices for the skips of a U-Net, through portals and in tuples: a part of memory.py.

The skip of the first layer goes to one of the last. A portal copies it once, from its device to the one where it is
needed, and its gradient once back. Without portals a Sequential has to hand it on from layer to layer, so it is
copied to every device on the way. Both ways run the same layers.

The bytes are counted as they are copied, not estimated; `examples/traffic.py` says how. They depend on the model
and on how it is split, not on the machine. On the CPU the devices are called cpu:0, cpu:1, ... and tensors are
copied between them as between GPUs.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.peers import examples_on_path
from benchmarks.records import table_of

__all__ = ["measure", "skips"]

PARTITIONS = (2, 4, 8)
WAYS = ("portals", "tuples")
CHUNKS = 4


def counted(args: argparse.Namespace, devices: list[str]) -> dict[str, Any]:
    """Count both ways over these devices."""
    from unet import counted_step, draw_images, unet, without_portals

    depth, width, size, batch = args.unet
    torch.manual_seed(0)
    model = unet(depth, width).to(devices[0])
    images, _ = draw_images(batch, size, torch.Generator().manual_seed(0))
    balance = [len(part) for part in torch.arange(len(model)).tensor_split(len(devices))]
    row: dict[str, Any] = {"balance": balance, "devices": devices}
    for way, layers, input in zip(WAYS, (model, without_portals(model)), (images, (images,))):
        _, copied = counted_step(layers, input, balance, devices, CHUNKS, "except_last")
        row[way] = {
            "copied": [[source, target, count] for (source, target), count in sorted(copied.items())],
            "total": copied.total(),
            "busiest": max(copied.values(), default=0),
        }
    return row


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    examples_on_path()
    asked = [args.devices] if len(args.devices) > 1 else [[f"cpu:{j}" for j in range(n)] for n in PARTITIONS]
    shape = dict(zip(("depth", "width", "size", "batch"), args.unet, strict=True))
    return {"unit": "bytes in a step", **shape, "chunks": CHUNKS, "rows": [counted(args, devices) for devices in asked]}


def megabytes(way: str, key: str) -> Any:
    return lambda row: f"{row[way][key] / 1e6:.2f}"


def skips(result: dict[str, Any]) -> str:
    columns: dict[str, Any] = {"partitions": lambda row: len(row["balance"])}
    columns |= {f"all, {way}": megabytes(way, "total") for way in WAYS}
    columns |= {f"busiest pair, {way}": megabytes(way, "busiest") for way in WAYS}
    columns["tuples / portals"] = lambda row: f"{row['tuples']['total'] / max(row['portals']['total'], 1):.2f}"
    return table_of(result["rows"], columns)
