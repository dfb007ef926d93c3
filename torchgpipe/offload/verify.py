"""Whether a model can live in host memory: its settings, its parameters, and the devices that its partitions use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.device import default_devices
from torchgpipe.devices.memory import memory_in_use, shown_size
from torchgpipe.devices.torch_internals import can_move_data
from torchgpipe.devices.typing import Device
from torchgpipe.model.attached import with_attached

__all__ = ["Pin", "Slots", "cycled", "each_device", "verify_fits", "verify_home", "verify_offload"]

T = TypeVar("T")

#: For each device, how many partitions have room, and how many bytes may be pinned; or one number for all.
Slots: TypeAlias = int | tuple[int, ...]
Pin: TypeAlias = int | tuple[int | None, ...] | None


def cycled(devices: Iterable[Device] | None, n: int) -> list[Device] | None:
    """Return a device for each of ``n`` partitions, given devices that they use in turn (default: all accelerators)."""
    if isinstance(devices, (str, int, torch.device)):
        devices = [devices]
    known = default_devices(1) if devices is None else list(devices)
    return [known[j % len(known)] for j in range(n)] if known else []


def verify_offload(offload: Any, slots: Any, pin: Any) -> tuple[Slots, Pin, bool] | None:
    """Return the arguments of `HostMemory` but the devices, or None if weights live on devices.

    Raises:
        TypeError: ``slots`` or ``pin`` is no integer, and no list of these.
        ValueError: ``offload`` is none of its values, there is no slot, ``pin`` is negative, or they have no use.
    """
    if offload not in (True, False, "weights"):
        raise ValueError(f"offload must be True, 'weights' or False, but got {offload!r}")
    if not offload:
        if slots != 2 or pin is not None:
            raise ValueError(f"slots={slots!r} and pin={pin!r} are for offload=True; leave them out, or give offload=")
        return None
    slots, pin = (tuple(each) if isinstance(each, list) else each for each in (slots, pin))
    for name, given, least in (("slots", slots, 1), ("pin", pin, 0)):
        for number in given if isinstance(given, tuple) else (given,):
            if name == "pin" and number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} must be an integer, or a list of one for each device, but got {given!r}")
            if number < least:
                raise ValueError(f"{name} must be {least} or more, but got {number}")
    return slots, pin, offload != "weights"


def each_device(name: str, setting: T | tuple[T, ...], devices: Iterable[torch.device]) -> dict[torch.device, T]:
    """Return the setting of each device, given one for all, or one for each in the order of their first partitions."""
    places = list(dict.fromkeys(devices))
    settings = setting if isinstance(setting, tuple) else (setting,) * len(places)
    if len(settings) != len(places):
        raise ValueError(
            f"{name} has {len(settings)} numbers, but the partitions are on {len(places)} devices, "
            f"{', '.join(map(str, places))}; give a number for each, or one for all"
        )
    return dict(zip(places, settings))


def verify_home(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """Check that weights can live in host memory.

    Raises:
        ValueError: a parameter, or a tensor among the attributes of a frozen one, is on a device or no plain tensor.
    """
    for name, parameter in named:
        if parameter is None:
            continue
        tensors = [parameter] if is_lazy(parameter) else with_attached([parameter])
        for tensor in tensors:
            if tensor.layout is not torch.strided or not _is_plain(tensor):
                raise ValueError(
                    f"'{name}' {'is' if tensor is parameter else 'has'} a {type(tensor).__name__} ({tensor.layout}), "
                    "whose values offload=True cannot copy as those of a plain parameter or of a frozen subclass: let "
                    "the model run once if it is lazy, freeze what is not trained (requires_grad_(False)), load "
                    "weights of 4 bits by bitsandbytes (load_in_4bit=True), or leave out offload and give more devices"
                )
            if tensor.device.type not in ("cpu", "meta"):
                raise ValueError(
                    f"'{name}' is on {tensor.device}, but under offload=True weights live in host memory; load the "
                    "model on the CPU, or move it there: model.cpu()"
                )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has all its values in memory of its own, and a gradient only if it is a parameter."""
    kind = type(tensor)
    if kind is nn.Parameter:
        return True
    is_known = kind is Tensor or (issubclass(kind, nn.Parameter) and not is_lazy(tensor))
    return is_known and not tensor.requires_grad and can_move_data(tensor, tensor.device)


def verify_fits(sizes: Iterable[tuple[str, torch.device, int]], slots: Slots) -> None:
    """Check that the weights of the largest partitions fit on their devices, as far as these tell their memory.

    Devices are all accelerators, or all the CPU: a partition that computes in host memory would find there what is
    still on its way from an accelerator.

    Args:
        sizes: for each partition, its name, its device, and the bytes of its weights
        slots: the partitions that are there at a time; see `HostMemory`

    Raises:
        ValueError: they do not fit, or the CPU is a device beside an accelerator.
    """
    sizes = list(sizes)
    devices = list(dict.fromkeys(device for _, device, _ in sizes))
    if len({device.type == "cpu" for device in devices}) > 1:
        raise ValueError(
            f"offload=True got the devices {', '.join(map(str, devices))}: with weights in host memory, the CPU is no "
            "device beside an accelerator; leave the CPU out of devices, or leave out offload"
        )
    slots_of = each_device("slots", slots, devices)
    by_device: dict[torch.device, list[tuple[int, str]]] = {}
    for name, device, size in sizes:
        by_device.setdefault(device, []).append((size, name))
    for device, weights in by_device.items():
        use, count = memory_in_use(device), slots_of[device]
        largest = sorted(weights, reverse=True)[:count]
        if use is not None and sum([size for size, _ in largest]) > use[2]:
            size, name = largest[0]
            raise ValueError(
                f"{name} takes {shown_size(size)} in {count} slots of {device} with {shown_size(use[2])}: give more "
                f"partitions, fewer slots, or a device with {shown_size(size * count)}"
            )
