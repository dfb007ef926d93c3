"""Test every link between devices, and measure its bandwidth."""

from __future__ import annotations

import argparse
import warnings
from itertools import permutations
from typing import Any

from torchgpipe.command.report import Report
from torchgpipe.devices.device import canonical_device, working_devices
from torchgpipe.devices.links import verify_links

__all__ = ["add_arguments", "run"]

_MEND = (
    "Copies over a broken link go through host memory, which is right, but slower. To mend it: update the driver; turn "
    "off ACS or the IOMMU in the firmware (amd_iommu=off, or iommu=pt); or leave a device out by CUDA_VISIBLE_DEVICES."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--devices", metavar="A,B", help="such as cuda:0,cuda:1 (default: all of this machine)")


def run(given: argparse.Namespace) -> Report:
    """Copy known bytes over each link, and measure copies."""
    from torchgpipe_balancing.planning.measure import seconds_of_copies
    from torchgpipe_balancing.table import table

    names = given.devices.split(",") if given.devices else working_devices()
    devices = [canonical_device(name) for name in dict.fromkeys(names)]
    rows = []
    for source, target in permutations(devices, 2):
        with warnings.catch_warnings(record=True) as broken:
            warnings.simplefilter("always")
            verify_links([source, target], 1)
        latency, per_byte = seconds_of_copies(source, target)
        bandwidth = 1 / per_byte if per_byte else None
        rows.append(
            {"from": str(source), "to": str(target), "works": not broken, "latency": latency}
            | {"bytes_per_second": bandwidth}
        )
    text = "\n".join(table([("from", "to", "state", "latency", "bandwidth"), *map(_shown, rows)], words=(0, 1, 2)))
    if not rows:
        text = f"no links: the only device is {devices[0]}"
    if not all(row["works"] for row in rows):
        text += f"\n{_MEND}"
    return Report(text, rows)


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    bandwidth = f"{row['bytes_per_second'] / 1e9:.1f} GB/s" if row["bytes_per_second"] else "-"
    state = "works" if row["works"] else "BROKEN"
    return row["from"], row["to"], state, f"{row['latency'] * 1e6:.0f} us", bandwidth
