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
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torchgpipe.devices.memory import memory_in_use
from torchgpipe.devices.stream import Stream, Streams
from torchgpipe.devices.torch_internals import memory_of, versions
from torchgpipe.offload.verify import Pin, Slots, each_device

__all__ = ["FrozenCopy", "HostMemory"]


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
        uploads: the number of times that the weights of a partition were uploaded
        bytes_up: the bytes of weights that were uploaded
        bytes_down: the bytes of gradients that were downloaded
        peaks: for each device, the most bytes of weights that were there at a time, but for frozen copies
    """

    least = 1 << 16

    def __init__(self, devices: Iterable[torch.device], slots: Slots, pin: Pin, activations: bool = True) -> None:
        self.slots, self._activations = each_device("slots", slots, devices), activations
        if not activations:
            self.least = sys.maxsize
        self.streams = Streams()
        self.uploads = self.bytes_up = self.bytes_down = 0
        self.peaks: Counter[torch.device] = Counter()
        self._present: Counter[torch.device] = Counter()
        #: The devices that have room for frozen copies.
        self._keeping: set[torch.device] = set()
        #: By partition.
        self._frozen: MutableMapping[Tensor, dict[int, FrozenCopy]] = WeakIdKeyDictionary()
        self._pin = pin
        pins = tuple(map(_Pins, pin)) if isinstance(pin, tuple) else _Pins(pin)
        self._pins = each_device("pin", pins, self.slots)
        self._lock = threading.Lock()

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

    def keep_frozen(self, weights: Iterable[tuple[Tensor, int]], devices: Sequence[torch.device]) -> None:
        """Decide which devices keep frozen copies from one mini-batch to the next: those with room beside the slots.

        Args:
            weights: the weights of the model, each with its partition
            devices: the device of each partition
        """
        frozen: Counter[torch.device] = Counter()
        trained: Counter[int] = Counter()
        for weight, j in {(id(weight), j): (weight, j) for weight, j in weights}.values():
            if weight.requires_grad:
                trained[j] += weight.nbytes
            else:
                frozen[devices[j]] += weight.nbytes
        for device, bytes in frozen.items():
            use = memory_in_use(device)
            slots = self.slots[device] * max([trained[j] for j, place in enumerate(devices) if place == device])
            # A quarter is for activations and gradients.
            (self._keeping.add if use and 4 * (bytes + slots) <= 3 * use[2] else self._keeping.discard)(device)

    def forget_frozen(self) -> None:
        """Forget what frozen copies have: the model has changed one."""
        for by_partition in self._frozen.values():
            for frozen in by_partition.values():
                frozen.forget()
        self._frozen.clear()

    def alias(self, parameter: Tensor, device: torch.device, j: int) -> tuple[Tensor, FrozenCopy | None]:
        """Return a tensor like a parameter on a device: without memory, or that of a frozen copy."""
        # A tensor of inference mode has no version, so nothing would tell that it has changed.
        keeps = device in self._keeping and not parameter.requires_grad and not parameter.is_inference()
        frozen = self._frozen.get(parameter, {}).get(j)
        if keeps and frozen is not None and frozen.fits(parameter, device):
            return frozen.values, frozen
        frozen = None
        # A tensor of inference mode could not be saved for a later backward.
        with self.up(device).use(), torch.inference_mode(False):
            values = torch.empty_like(parameter.detach(), device=device)
            if keeps:
                frozen = self._frozen.setdefault(parameter, {})[j] = FrozenCopy(values, device)
            else:
                self._frozen.pop(parameter, None)
                values.untyped_storage().resize_(0)
        return values, frozen

    @torch.no_grad()
    def fill(self, alias: Tensor, parameter: Tensor, device: torch.device, frozen: FrozenCopy | None = None) -> None:
        """Give an alias memory, and the values of its parameter, on the current stream.

        Args:
            alias: the alias
            parameter: the parameter
            device: the device, by the name that its partition has for it
            frozen: the frozen copy that the alias is, which is filled only if the parameter has changed
        """
        if frozen is not None and frozen.is_of(parameter):
            return
        if alias.device.type == "cuda":
            self._pins[device].pin(parameter)
        extent = 1 + sum([(size - 1) * stride for size, stride in zip(alias.size(), alias.stride())])
        alias.untyped_storage().resize_(extent * alias.element_size() if alias.numel() else 0)
        # `.data` has a version of its own, so a graph that has saved the alias does not take this for a change.
        alias.data.copy_(parameter.detach(), non_blocking=True)
        bytes = alias.untyped_storage().nbytes()
        with self._lock:
            self.bytes_up += bytes
            self._present[device] += bytes if frozen is None else 0
            self.peaks[device] = max(self.peaks[device], self._present[device])
        if frozen is not None:
            frozen.note(parameter)

    def evict(self, aliases: Iterable[Tensor], device: torch.device) -> None:
        """Free the memory of aliases that were filled, on the current stream."""
        storages = [alias.untyped_storage() for alias in aliases]
        bytes = sum([storage.nbytes() for storage in storages])
        for storage in storages:
            storage.resize_(0)
        with self._lock:
            self._present[device] -= bytes

    def download(self, grad: Tensor, stream: Stream) -> Tensor:
        """Return a gradient in host memory; it has arrived when ``stream``, which is the current one, is through."""
        with self._lock:
            self.bytes_down += memory_of(grad).nbytes()
        if grad.device.type == "cpu":
            return grad
        if grad.layout is not torch.strided:
            return grad.to("cpu")
        down = torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad, non_blocking=True)
        stream.record(grad)
        return down

    def count_upload(self) -> None:
        """Count an upload of the weights of a partition."""
        with self._lock:
            self.uploads += 1


class FrozenCopy:
    """A frozen weight that stays on its device, and what is known of the parameter whose values it has."""

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self.values, self.device = values, device
        self._seen: tuple[object, ...] | None = None

    def fits(self, parameter: Tensor, device: torch.device) -> bool:
        """Return whether a parameter has room here as it is."""
        values = self.values
        layout = device, parameter.shape, parameter.dtype, parameter.stride()
        return (self.device, values.shape, values.dtype, values.stride()) == layout

    def forget(self) -> None:
        """Forget what the values are, so that they come again."""
        self._seen = None

    def is_of(self, parameter: Tensor) -> bool:
        """Return whether the parameter is as it was noted, by its memory and version."""
        return self._seen == _state(parameter)

    def note(self, parameter: Tensor) -> None:
        """Note what the parameter is."""
        self._seen = _state(parameter)


def _state(parameter: Tensor) -> tuple[object, ...]:
    """Return what tells whether a parameter has changed: its memory, its place there, and its version.

    An address is not enough: memory that takes the place of another may have got that of one before it.
    """
    return weakref.ref(parameter.untyped_storage()), parameter.storage_offset(), versions([parameter])[0]


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
