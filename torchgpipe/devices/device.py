"""Devices: which there are, and which of them are one place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.typing import Device

__all__ = ["bring", "canonical_device", "default_device", "default_devices", "device_module", "same_memory"]


def device_module(device: torch.device) -> Any:
    """The module of torch that speaks for a kind of device, such as ``torch.cuda``."""
    return torch.get_device_module(device.type)


def canonical_device(device: Device) -> torch.device:
    """``device`` with the index that PyTorch would take, so that equal devices compare equal.

    The CPU stays as it is written: ``'cpu:0'`` and ``'cpu:1'`` are two devices that share one memory.
    """
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        device = torch.device(device.type, device_module(device).current_device())
    return device


def default_device() -> torch.device:
    """The current accelerator, or the CPU where there is none."""
    return canonical_device(_accelerator() or "cpu")


def default_devices(n: int) -> list[torch.device]:
    """All accelerators of the machine, or the CPU ``n`` times where there is none."""
    accelerator = _accelerator()
    if accelerator is None:
        return [torch.device("cpu")] * n
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def same_memory(a: torch.device, b: torch.device) -> bool:
    """Whether what is on one device is on the other as well.

    The CPU has one memory, whatever index a device of it carries.
    """
    return a == b or a.type == b.type == "cpu"


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``: itself, if it is there. (PyTorch copies a tensor on the CPU to ``'cpu:1'``.)"""
    return tensor if same_memory(tensor.device, device) else tensor.to(device)
