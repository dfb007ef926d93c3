"""Host memory, where weights live: transfers to a device and back, on streams of their own.

An alias of such a weight keeps its identity. Its memory is allocated when it is filled, and freed when it is evicted,
so graphs that have saved the alias stay valid. Memory is allocated, written and freed on the stream that uploads, and
the allocator hands it out again in the order of that stream: an upload never needs more than what was freed before.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.stream import Stream, Streams
from torchgpipe.offload.verify import Pin, Slots, each_device

__all__ = ["HostMemory"]


class HostMemory:
    """Transfers weights to devices, and gradients back.

    Args:
        devices: the device of each partition
        slots: the partitions whose weights have room on a device at a time; a number, or one for each device, in the
            order of their first partitions
        pin: the bytes of weights in host memory that may be pinned for all devices together, or for each; None for
            half of the memory that is free
        activations: whether activations wait in host memory, too

    Attributes:
        slots: for each device, the partitions whose weights have room there at a time
        least: the bytes from which on an activation waits there; a copy takes the host as long as some launches
        streams: the source of streams
    """

    least = 1 << 16

    def __init__(self, devices: Iterable[torch.device], slots: Slots, pin: Pin, activations: bool = True) -> None:
        self.slots, self._activations = each_device("slots", slots, devices), activations
        if not activations:
            self.least = sys.maxsize
        self.streams = Streams()
        self._pin = pin
        pins = tuple(map(_Pins, pin)) if isinstance(pin, tuple) else _Pins(pin)
        self._pins = each_device("pin", pins, self.slots)

    def __reduce__(self) -> Any:
        """Let a copy of a pipeline have one of its own."""
        return HostMemory, ([*self.slots], tuple(self.slots.values()), self._pin, self._activations)

    def up(self, device: torch.device) -> Stream:
        """Return the stream of a device that weights arrive on."""
        return self.streams.side(device, "weights arriving")

    def down(self, device: torch.device) -> Stream:
        """Return the stream of a device that gradients leave on."""
        return self.streams.side(device, "gradients leaving")

    def synchronize(self, device: torch.device) -> None:
        """Wait for the transfers of weights and gradients of a device."""
        self.up(device).synchronize()
        self.down(device).synchronize()

    def alias(self, parameter: Tensor, device: torch.device) -> Tensor:
        """Return a tensor like a parameter on a device, without memory."""
        # A tensor of inference mode could not be saved for a later backward.
        with self.up(device).use(), torch.inference_mode(False):
            values = torch.empty_like(parameter.detach(), device=device)
            values.untyped_storage().resize_(0)
        return values

    @torch.no_grad()
    def fill(self, alias: Tensor, parameter: Tensor, device: torch.device) -> None:
        """Give an alias memory, and the values of its parameter, on the current stream.

        Args:
            alias: the alias
            parameter: the parameter
            device: the device, by the name that its partition has for it
        """
        if alias.device.type == "cuda":
            self._pins[device].pin(parameter)
        extent = 1 + sum([(size - 1) * stride for size, stride in zip(alias.size(), alias.stride())])
        alias.untyped_storage().resize_(extent * alias.element_size() if alias.numel() else 0)
        # `.data` has a version of its own, so a graph that has saved the alias does not take this for a change.
        alias.data.copy_(parameter.detach(), non_blocking=True)

    def download(self, grad: Tensor, stream: Stream) -> Tensor:
        """Return a gradient in host memory; it has arrived when ``stream``, which is the current one, is through."""
        if grad.device.type == "cpu":
            return grad
        if grad.layout is not torch.strided:
            return grad.to("cpu")
        down = torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad, non_blocking=True)
        stream.record(grad)
        return down


class _Pins:
    """Memory of the host that the driver of an accelerator has locked, so that copies run beside the computation."""

    def __init__(self, budget: int | None) -> None:
        self._left = budget
        #: The addresses of the memories that have been looked at, and are alive.
        self._known: set[int] = set()
        # Memory may go, and be unpinned, in the midst of a block that holds the lock.
        self._lock = threading.RLock()

    def pin(self, tensor: Tensor) -> None:
        """Lock the memory of a tensor, once, within the budget."""
        storage = tensor.untyped_storage()
        with self._lock:
            address, bytes = storage.data_ptr(), storage.nbytes()
            if address in self._known:
                return
            self._known.add(address)
            weakref.finalize(storage, self._known.discard, address)
            if tensor.is_pinned():
                return
            if self._left is None:  # Windows has no `sysconf`, so `pin` must say how much.
                knows = hasattr(os, "sysconf")
                self._left = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if knows else 0
            if not 0 < bytes <= self._left:
                return
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(runtime.cudaHostRegister(address, bytes, 0)) == 0:
                self._left -= bytes
                weakref.finalize(storage, self._unpin, runtime, address, bytes)
            else:
                # The memory works without. But CUDA keeps the error, and the next launch of this thread would raise it.
                with suppress(RuntimeError):
                    torch.ones(1, device="cuda").add_(1)

    def _unpin(self, runtime: Any, address: int, bytes: int) -> None:
        runtime.cudaHostUnregister(address)
        with self._lock:
            self._left = (self._left or 0) + bytes
