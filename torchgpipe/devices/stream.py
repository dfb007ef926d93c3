"""One vocabulary for the queues of work of all devices, so that nobody else asks what kind a device is.

An accelerator works through streams: what is launched on one is done in order, later, and beside what is on
the other streams. Three rules keep that right, and a stream has words for each of them:

* who reads what another stream computes waits first until it is there (``mark`` behind the one, ``wait`` before the
  other);
* a tensor that is freed while a foreign stream still works on it must be reported to the allocator (``record``);
* kernels go to the stream that is current where they are launched (``use``).

On the CPU work is done when the call returns. Its stream keeps all three rules by doing nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.device import device_module, same_memory

__all__ = ["AcceleratorStream", "Mark", "Stream", "Streams", "Tick"]

#: A place in the work of a stream: behind all that was launched there by then. None where work is done at once.
Mark = Any

#: The time of such a place: known when the stream has got there.
Tick = Any


class Stream:
    """The stream of a device that works at once. Base of those that do not.

    Attributes:
        device: where it works
        name: what it is for, as shown in a timeline
    """

    def __init__(self, device: torch.device, name: str = "computing") -> None:
        self.device = device
        self.name = name

    def mark(self) -> Mark:
        """Marks the end of the work that this stream has by now."""
        return None

    def wait(self, mark: Mark) -> None:
        """Lets the work that is launched here from now on start after what is before ``mark``."""

    def record(self, tensor: Tensor) -> None:
        """Tells the allocator that this stream works on ``tensor``, which another stream has allocated."""

    def use(self) -> AbstractContextManager[Any]:
        """Makes this stream, and its device, current in this thread for a ``with`` block."""
        return nullcontext()

    def tick(self) -> Tick:
        """Notes the time at which this stream gets here."""
        return perf_counter()

    def seconds(self, start: Tick, end: Tick) -> float:
        """The time between two ticks of this device's streams; waits until the later one is there."""
        result: float = end - start
        return result

    def synchronize(self) -> None:
        """Lets the host wait for all work that was launched here."""


class AcceleratorStream(Stream):
    """A stream of CUDA or of a backend that is built like it."""

    def __init__(self, device: torch.device, native: Any, name: str = "computing") -> None:
        super().__init__(device, name)
        self.native = native

    def mark(self) -> Mark:
        return self.native.record_event()

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            self.native.wait_event(mark)

    def tick(self) -> Tick:
        event = device_module(self.device).Event(enable_timing=True)
        event.record(self.native)
        return event

    def seconds(self, start: Tick, end: Tick) -> float:
        start.synchronize()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000

    def synchronize(self) -> None:
        self.native.synchronize()

    def record(self, tensor: Tensor) -> None:
        if tensor.device.type == self.device.type:
            tensor.record_stream(self.native)

    def use(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = device_module(self.device).stream(self.native)
        return context


class Streams:
    """Where streams come from. A pipeline is given one of these, and asks it for all it needs to know."""

    def current(self, device: torch.device) -> Stream:
        """The stream on which this thread computes on ``device``."""
        if not _has_streams(device.type):
            return Stream(device)
        return AcceleratorStream(device, device_module(device).current_stream(device))

    def side(self, device: torch.device, purpose: str) -> Stream:
        """The stream of ``device`` that is kept for ``purpose``, beside the computation."""
        return _side_stream(device, purpose)

    def moves(self, source: torch.device, target: torch.device) -> bool:
        """Whether a tensor has to be copied to get from ``source`` to ``target``."""
        return not same_memory(source, target)


@cache
def _side_stream(device: torch.device, purpose: str) -> Stream:
    # Kept for the life of the process: the allocator holds on to the memory of a stream, and a new stream for
    # each call would spread it out. The two directions of one device have a stream each, because a copy holds
    # up the streams of both its ends, and a chain of neighbours would come to wait for each other.
    if not _has_streams(device.type):
        return Stream(device, purpose)
    return AcceleratorStream(device, device_module(device).Stream(device), purpose)


@cache
def _has_streams(device_type: str) -> bool:
    return device_type != "cpu" and hasattr(torch.get_device_module(device_type), "Stream")
