"""One vocabulary for the streams of all devices, so that code that copies or waits asks for no kind of device.

An accelerator works through streams. Work that is launched on a stream runs later and in order, and beside the work of
other streams. Three rules keep results right, and a stream has methods for each rule:

* before a stream reads what another stream computes, it waits for the other (``mark`` on the writer, ``wait`` on the
  reader);
* the allocator must know every foreign stream that works on a tensor, or it reuses the memory too early (``record``);
* a kernel goes to the stream that is current in the thread that launches it (``use``).

On the CPU, work is finished when the call returns, so its stream keeps all three rules as a no-op. The same is believed
of an accelerator whose module in torch has no ``Stream``: there is one stream for each device, the caller's, which is
made current wherever a cell runs. All else goes through ``torch.accelerator``, whatever the module is called.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.device import same_memory

__all__ = ["AcceleratorStream", "Mark", "Stream", "Streams", "Tick"]

#: A position in a stream: after everything that was launched before. None on a device that works at once.
Mark = Any

#: The time at a position in a stream. It is known when the stream has reached the position.
Tick = Any


class Stream:
    """The stream of a device that works at once, and the base of other streams.

    Attributes:
        device: the device of the stream
        name: the purpose of the stream, as shown in a timeline
    """

    def __init__(self, device: torch.device, name: str = "computing") -> None:
        self.device = device
        self.name = name

    def mark(self) -> Mark:
        """Mark the end of the work that was launched on this stream so far."""
        return None

    def wait(self, mark: Mark) -> None:
        """Hold back all later work of this stream until another stream reaches ``mark``."""

    def record(self, tensor: Tensor) -> None:
        """Tell the allocator that this stream works on ``tensor``, which another stream has allocated."""

    def use(self) -> AbstractContextManager[Any]:
        """Make this stream and its device current in this thread for a ``with`` block."""
        return nullcontext()

    def tick(self) -> Tick:
        """Note the time at which this stream reaches its present end."""
        return perf_counter()

    def seconds(self, start: Tick, end: Tick) -> float:
        """Return the time between two ticks of streams of this device, and wait for both ticks."""
        result: float = end - start
        return result

    def synchronize(self) -> None:
        """Let the host wait for all work of this stream."""


class _OnlyStream(Stream):
    """The stream of an accelerator that computes at once."""

    def __init__(self, device: torch.device, native: Any, name: str = "computing") -> None:
        super().__init__(device, name)
        self.native = native

    def use(self) -> AbstractContextManager[Any]:
        return _Use(self.device, self.native)


class AcceleratorStream(_OnlyStream):
    """A stream of an accelerator, beside others of the same device."""

    def mark(self) -> Mark:
        return self.native.record_event()

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            self.native.wait_event(mark)

    def tick(self) -> Tick:
        event = torch.Event(self.device.type, enable_timing=True)
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


class _Use:
    """A ``with`` block in which a device and a stream of it are current; a new object for each block.

    Threads share a stream, and what was current before is a matter of each thread.
    """

    __slots__ = ("_before", "_device", "_index", "_native")

    def __init__(self, device: torch.device, native: Any) -> None:
        self._device = device
        self._native = native

    def __enter__(self) -> None:
        self._index = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._device.index)
        self._before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._native)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)
        torch.accelerator.set_device_index(self._index)


class Streams:
    """The source of all streams of a pipeline, which tests can replace."""

    def current(self, device: torch.device) -> Stream:
        """Return the stream on which this thread computes on ``device``."""
        if device.type == "cpu":
            return Stream(device)
        kind = AcceleratorStream if _has_side_streams(device.type) else _OnlyStream
        return kind(device, torch.accelerator.current_stream(device))

    def side(self, device: torch.device, purpose: str) -> Stream:
        """Return the stream of ``device`` for ``purpose``, which works beside the computation."""
        if device.type == "cpu" or _has_side_streams(device.type):
            return _side_stream(device, purpose)
        return _OnlyStream(device, torch.accelerator.current_stream(device), purpose)

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the device of ``tensor``; None if the tensor can be used on every device."""
        # PyTorch mixes numbers on the CPU with tensors on any device.
        return None if tensor.dim() == 0 and tensor.device.type == "cpu" else tensor.device

    def moves(self, source: torch.device, target: torch.device) -> bool:
        """Return whether a tensor must be copied to get from ``source`` to ``target``."""
        return not same_memory(source, target)


@cache
def _side_stream(device: torch.device, purpose: str) -> Stream:
    # Cached for the life of the process: the allocator keeps memory for each stream, so new streams at each call would
    # fragment it. What leaves and what arrives has a stream each, because a copy occupies a stream at both of its ends:
    # with one stream for both, the copies of a chain of neighbours would wait for each other.
    if device.type == "cpu":
        return Stream(device, purpose)
    return AcceleratorStream(device, torch.Stream(device), purpose)


@cache
def _has_side_streams(device_type: str) -> bool:
    return hasattr(torch.get_device_module(device_type), "Stream")
