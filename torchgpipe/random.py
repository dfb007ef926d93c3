"""Replaying random numbers: the second run of a layer must draw what the first run drew.

A layer draws from the generator of the CPU or of its own device. Before a checkpointed cell runs, the states
of both are noted; after it, those that did not change are forgotten, and a cell that drew nothing restores
nothing. That the state is noted per cell makes backward independent of what was drawn in between.

The CPU has one generator for all threads. Two cells that draw from it at the same time would each see half
of the other's numbers, and no state that could be noted would bring back what they drew. So where cells run
on the CPU they take turns (`share_generator`), and where an accelerator's layer draws from the CPU beside
other cells, it is refused (`Draws`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.stream import device_module

__all__ = ["Draws", "share_generator"]


class _Source(NamedTuple):
    """A generator: how to note its state and how to restore it."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], Any]


def share_generator(devices: Sequence[torch.device]) -> bool:
    """Whether cells on these devices draw from one generator as a matter of course."""
    return any(device.type == "cpu" for device in devices)


@cache
def _sources(device: torch.device) -> tuple[_Source, ...]:
    cpu = _Source(torch.default_generator.get_state, torch.default_generator.set_state)
    if device.type == "cpu":
        return (cpu,)
    module = device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators:  # without the checks of the functions below
        own = _Source(generators[device.index].get_state, generators[device.index].set_state)
    else:
        own = _Source(module.get_rng_state, module.set_rng_state)
    return cpu, own


class Draws:
    """Which generators a cell draws from, and their states before.

    Args:
        device: the device of the cell
        alone: whether no other cell runs at the same time that may draw from the CPU's generator
    """

    __slots__ = ("_alone", "_noted")

    def __init__(self, device: torch.device, alone: bool) -> None:
        self._alone = alone
        self._noted = [(source, source.get()) for source in _sources(device)]

    def close(self) -> None:
        """Ends the first run: keeps the states of those generators that it has drawn from.

        Raises:
            RuntimeError: numbers were drawn from the CPU's generator while other cells ran beside this one.
        """
        self._noted = [(source, state) for source, state in self._noted if not _equal(source.get(), state)]
        if not self._alone and any(source.set == torch.default_generator.set_state for source, _ in self._noted):
            raise RuntimeError(
                "a layer drew random numbers from the CPU's generator while layers on other devices ran beside "
                "it, so that recomputation could not draw the same ones again; draw them on the layer's own "
                "device (device=input.device), or use checkpoint='never'"
            )

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draws the same numbers again; afterwards the generators are as if nothing had been drawn."""
        current = [(source, source.get()) for source, _ in self._noted]
        for source, state in self._noted:
            source.set(state)
        try:
            yield
        finally:
            for source, state in current:
                source.set(state)

    def __bool__(self) -> bool:
        return bool(self._noted)


def _equal(a: Tensor, b: Tensor) -> bool:
    # A third of the time of torch.equal, and modes of the user do not see it as an operation of the model.
    return bytes(a.numpy().data) == bytes(b.numpy().data)
