"""The random number generators of devices, whatever the module of a kind of device offers.

PyTorch copies a state while it holds a lock of the generator, and creates a Python object there. Before Python 3.12,
that can start the garbage collector, which can switch threads. If the other thread then waited for the generator's
lock, it would hold the interpreter lock meanwhile: a deadlock. So all states are read and set here, under a lock that a
thread waits for while it holds neither of the two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from torchgpipe.devices.device import device_module

__all__ = ["Generator", "device_generator", "generators_of", "generators_of_all", "go_on_from", "state_of"]


class Generator(Protocol):
    """What is used of a `torch.Generator`."""

    @property
    def device(self) -> torch.device:
        """The device that it draws for."""

    def get_state(self) -> Tensor:
        """Return a copy of the state."""

    def set_state(self, new_state: Tensor) -> Any:
        """Go on from a state."""

    def manual_seed(self, seed: int) -> Any:
        """Begin anew from a seed."""


_copying = threading.Lock()


def state_of(generator: Generator) -> Tensor:
    """Return a copy of the state of a generator."""
    with _copying:
        return generator.get_state()


def go_on_from(generator: Generator, start: Tensor | int) -> None:
    """Let a generator go on from a state, or from a seed."""
    with _copying:
        if isinstance(start, Tensor):
            generator.set_state(start)
        else:
            generator.manual_seed(start)


@cache
def generators_of(device: torch.device) -> tuple[Generator, ...]:
    """Return the generators that layers on ``device`` draw from: that of the CPU, and that of the device."""
    return tuple(dict.fromkeys([torch.default_generator, device_generator(device)]))


def generators_of_all(devices: Iterable[torch.device]) -> list[Generator]:
    """Return the generators of the CPU and of devices, each once."""
    return list(dict.fromkeys([one for device in (torch.device("cpu"), *devices) for one in generators_of(device)]))


@cache
def device_generator(device: torch.device) -> Generator:
    """Return the generator that operations on ``device`` draw from, unless they are given another one.

    Args:
        device: a device of the CPU, or an accelerator with its index
    """
    if device.type == "cpu":
        return torch.default_generator
    own = getattr(device_module(device), "default_generators", None)
    return _DeviceGenerator(device) if not own else own[device.index]


class _DeviceGenerator:
    """The generator of a device whose module has functions for the current device only."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = device_module(device)

    def get_state(self) -> Tensor:
        with torch.accelerator.device_index(self.device.index):
            state: Tensor = self._module.get_rng_state()
        return state

    def set_state(self, new_state: Tensor) -> None:
        with torch.accelerator.device_index(self.device.index):
            self._module.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        with torch.accelerator.device_index(self.device.index):
            self._module.manual_seed(seed)
