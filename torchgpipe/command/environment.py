"""Print versions and devices, for reports."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import import_module
from typing import Any

import torch

from torchgpipe.command.report import Report
from torchgpipe.devices.device import accelerators, kind_of
from torchgpipe.devices.memory import shown_size

__all__ = ["add_arguments", "run"]

#: What pipelines are used together with.
_BESIDE = "accelerate bitsandbytes diffusers lightning numpy peft safetensors transformers trl".split()  # noqa: SIM905


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this command has no arguments."""


def run(given: argparse.Namespace) -> Report:
    """Look at the machine."""
    from importlib.metadata import distributions

    there = {distribution.metadata["Name"]: distribution.version for distribution in distributions()}
    data: dict[str, Any] = {
        "torchgpipe": import_module("torchgpipe").__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        "packages": {name: there[name] for name in _BESIDE if name in there},
        "devices": {
            str(device): {"kind": kind_of(device), "memory": torch.accelerator.get_memory_info(device)[1]}
            for device in accelerators()
        },
    }
    told = {**data, "packages": ", ".join(f"{name} {version}" for name, version in data["packages"].items())}
    devices = [f"{name} {one['kind']}, {shown_size(one['memory'])}" for name, one in data["devices"].items()]
    told["devices"] = "; ".join(devices) or "none but the CPU"
    return Report("\n".join(f"{name:11} {value}" for name, value in told.items()), data)
