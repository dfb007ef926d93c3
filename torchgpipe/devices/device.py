"""Devices: the defaults, one spelling for each device, and devices that share a memory."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices import links
from torchgpipe.devices.typing import Device

__all__ = [
    "accelerators",
    "bring",
    "canonical_device",
    "default_device",
    "default_devices",
    "device_module",
    "kind_of",
    "same_memory",
    "working_devices",
]


def device_module(device: torch.device) -> Any:
    """Return the module of torch for a kind of device, such as ``torch.cuda``."""
    return torch.get_device_module(device.type)


def kind_of(device: torch.device) -> str:
    """Return the name of a device's model, such as ``'NVIDIA L4'``, or its type where PyTorch knows no such name."""
    named = getattr(device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


def canonical_device(device: Device) -> torch.device:
    """Return ``device`` with the index that PyTorch would choose, so that equal devices compare equal.

    A CPU keeps the index that it has or lacks: ``'cpu:0'`` and ``'cpu:1'`` are two devices that share one memory.

    Raises:
        ValueError: PyTorch knows or sees no such device.
    """
    if isinstance(device, int) and _accelerator() is None:
        raise ValueError(
            f"{device} is the number of an accelerator, but PyTorch sees none; to try it on the CPU, give "
            "devices=['cpu', 'cpu']"
        )
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"a device must be one of PyTorch, such as 'cuda:0' or 'cpu', but got {device!r}") from None
    if device.type in ("cpu", "meta"):
        return device
    count = device_module(device).device_count()
    if (device.index or 0) >= count:
        kind = "GPU" if device.type == "cuda" else f"device of type '{device.type}'"
        raise ValueError(
            f"'{device}' is not there: PyTorch sees {count or 'no'} {kind}{'s' * (count > 1)}; "
            + (f"the last is '{device.type}:{count - 1}'" if count else f"see torch.{device.type}.is_available()")
            + ", or to try it on the CPU, give devices=['cpu', 'cpu']"
        )
    return torch.device(device.type, torch.accelerator.current_device_index()) if device.index is None else device


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU if there is no accelerator."""
    return canonical_device(_accelerator() or "cpu")


def accelerators() -> list[torch.device]:
    """Return all accelerators of the machine."""
    kind = _accelerator()
    return [] if kind is None else [torch.device(kind.type, k) for k in range(torch.accelerator.device_count())]


def default_devices(n: int) -> list[torch.device]:
    """Return all accelerators of the machine, or the CPU ``n`` times if there is no accelerator.

    Raises:
        RuntimeError: a launcher has started several processes, each of which would use all accelerators.
    """
    there, processes = accelerators(), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if len(there) > 1 and processes != "1":
        raise RuntimeError(
            f"a launcher (torchrun, accelerate launch) has started {processes} processes here, and each would use all "
            f"{len(there)} devices; start the script with python alone, or give each process devices= of its own, for "
            "replicas, or mesh=, for a pipeline over processes"
        )
    return there or [torch.device("cpu")] * n


def working_devices() -> list[torch.device]:
    """Return all devices of the machine that can work side by side: its accelerators, or else its cores."""
    if _accelerator() is not None:
        return default_devices(1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [torch.device("cpu", k) for k in range(cores)]


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def same_memory(a: torch.device, b: torch.device) -> bool:
    """Return whether a tensor on one device is on the other as well: the devices are equal, or both are the CPU."""
    return a == b or a.type == b.type == "cpu"


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``: the tensor itself if the device has the same memory, and a copy otherwise."""
    # `Tensor.to` would copy from 'cpu' to 'cpu:1'.
    return tensor if same_memory(tensor.device, device) else links.to(tensor, device)
