"""The random number generators: of devices, whatever the module of a kind of device offers, of Python and of NumPy.

PyTorch copies a state while it holds a lock of the generator, and creates a Python object there. Before Python 3.12,
that can start the garbage collector, which can switch threads. If the other thread then waited for the generator's
lock, it would hold the interpreter lock meanwhile: a deadlock. So all states are read and set here, under a lock that a
thread waits for while it holds neither of the two.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from ctypes import string_at
from functools import cache
from struct import pack, unpack
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchgpipe.devices.device import device_module

__all__ = ["OUTSIDE", "Generator", "device_generator", "generators_of", "generators_of_all", "go_on_from", "state_of"]


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
    """Return the generators that layers on ``device`` draw from: of the CPU, the device, Python and NumPy."""
    return tuple(dict.fromkeys([torch.default_generator, device_generator(device), *OUTSIDE]))


def generators_of_all(devices: Iterable[torch.device]) -> list[Generator]:
    """Return the generators of the CPU and of devices, each once."""
    all_devices = (torch.device("cpu"), *devices)
    return list(dict.fromkeys([generator for device in all_devices for generator in generators_of(device)]))


@cache
def device_generator(device: torch.device) -> Generator:
    """Return the generator that operations on ``device`` draw from, unless they are given another one.

    Args:
        device: a device of the CPU, or an accelerator with its index
    """
    if device.type == "cpu":
        return torch.default_generator
    default = getattr(device_module(device), "default_generators", None)
    return _DeviceGenerator(device) if not default else default[device.index]


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


#: The words of a twister, their position, and a number in reserve.
_WORDS, _PACKED = 624, "624IId?"


class _Twister(ABC):
    """The generator of Python or of NumPy, both Mersenne twisters: 624 words, and perhaps a normal number in reserve.

    Their own functions make objects of all words, which takes as long as a small layer. So the position and some words
    are looked at in memory: each draw moves the one, and the last one changes all words. A number in reserve may be
    drawn without that.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._seen = b""
        self._state: Any = None
        self._has_reserve = True

    @abstractmethod
    def _look(self) -> bytes:
        """Return the position and some words."""

    @abstractmethod
    def _get(self) -> tuple[Sequence[int], int, float | None]:
        """Return the words, the position among them, and the number in reserve."""

    @abstractmethod
    def _set(self, words: Any, position: int, reserve: float | None) -> None:
        """Go on from what `_get` returns."""

    def get_state(self) -> Tensor:
        seen = self._look()
        if self._has_reserve or seen != self._seen:
            words, position, reserve = self._get()
            self._seen, self._has_reserve = seen, reserve is not None
            packed = pack(_PACKED, *words, position, reserve or 0.0, self._has_reserve)
            self._state = torch.from_numpy(np.frombuffer(bytearray(packed), dtype=np.uint8))
        return self._state  # type: ignore[no-any-return]

    def set_state(self, new_state: Tensor) -> None:
        *words, position, reserve, has_reserve = unpack(_PACKED, new_state.numpy().tobytes())
        self._set(words, position, reserve if has_reserve else None)
        self._has_reserve = True  # Perhaps: what was looked at does not tell.


class _OfPython(_Twister):
    """The generator of Python's ``random``, whose words are behind the head of the object."""

    def __init__(self) -> None:
        super().__init__()
        self._random: random.Random = random.random.__self__  # type: ignore[attr-defined]
        self._address = id(self._random) + object.__basicsize__
        words, position, _ = self._get()
        #: Whether the words are there, as they are in CPython.
        self._is_there = string_at(self._address, 16) == pack("4I", position, *words[:3])

    def _look(self) -> bytes:
        return string_at(self._address, 16) if self._is_there else repr(self._get()).encode()

    def _get(self) -> tuple[Sequence[int], int, float | None]:
        _, (*words, position), reserve = self._random.getstate()
        return words, position, reserve

    def _set(self, words: Any, position: int, reserve: float | None) -> None:
        self._random.setstate((3, (*words, position), reserve))

    def manual_seed(self, seed: int) -> None:
        self._random.seed(seed)


class _OfNumpy(_Twister):
    """The generator of ``numpy.random``."""

    def _look(self) -> bytes:
        address: int = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
        return string_at(address + 4 * (_WORDS - 3), 16)  # The last three words, and the position behind them.

    def _get(self) -> tuple[Sequence[int], int, float | None]:
        state: Any = np.random.get_state()
        _, words, position, has_reserve, reserve = state
        return words.tolist(), position, reserve if has_reserve else None

    def _set(self, words: Any, position: int, reserve: float | None) -> None:
        np.random.set_state(("MT19937", words, position, reserve is not None, reserve or 0.0))

    def manual_seed(self, seed: int) -> None:
        np.random.seed(seed)


#: The generators of Python and of NumPy, for all threads of the process.
OUTSIDE: tuple[Generator, ...] = (_OfPython(), _OfNumpy())
