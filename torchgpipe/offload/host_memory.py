"""Weights that live in host memory: copies to a device and back, on streams of their own.

An alias of such a weight keeps its identity. Its memory comes when it is filled, and goes when it is emptied; so graphs
that have saved the alias stay valid. Memory is allocated, written and given back on the stream that uploads, and the
allocator hands it out again in the order of that stream: an upload never needs more than what was given back before.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from torchgpipe.devices.device import default_devices
from torchgpipe.devices.memory import memory_in_use, shown_size
from torchgpipe.devices.stream import Stream, Streams
from torchgpipe.devices.torch_internals import versions
from torchgpipe.devices.typing import Device

__all__ = [
    "FrozenCopy",
    "HostMemory",
    "Pin",
    "Slots",
    "cycled",
    "empty",
    "verify_fits",
    "verify_home",
    "verify_offload",
]


T = TypeVar("T")

#: For each device, how many partitions have room, and how many bytes may be pinned; or one number for all.
Slots: TypeAlias = int | tuple[int, ...]
Pin: TypeAlias = int | tuple[int | None, ...] | None


class HostMemory:
    """Takes weights to devices, and gradients back.

    Args:
        devices: the device of each partition
        slots: the partitions whose weights have room on a device at a time; a number, or one for each device, in the
            order of their first partitions
        pin: the bytes of weights in host memory that may be pinned for all devices together, or for each; None for
            half of the memory that is free
        rests: whether activations wait in host memory, too

    Attributes:
        slots: for each device, the partitions whose weights have room there at a time
        rests: whether activations wait in host memory, too
        least: the bytes from which on a tensor waits there; a copy takes the host as long as some launches
        streams: the source of streams
        uploads: the number of times that the weights of a partition have gone up
        bytes_up: the bytes of weights that have gone up
        bytes_down: the bytes that have come down
        peaks: for each device, the most bytes of weights that were there at a time, but for those that stay
    """

    least = 1 << 16

    def __init__(self, devices: Iterable[torch.device], slots: Slots, pin: Pin, rests: bool = True) -> None:
        self.slots, self.rests = _each("slots", slots, devices), rests
        self.streams = Streams()
        self.uploads = self.bytes_up = self.bytes_down = 0
        self.peaks: Counter[torch.device] = Counter()
        self._there: Counter[torch.device] = Counter()
        #: Where frozen weights stay from one mini-batch to the next.
        self._keeping: set[torch.device] = set()
        #: Those that stay, of each partition.
        self._kept: MutableMapping[Tensor, dict[int, FrozenCopy]] = WeakIdKeyDictionary()
        self._pin = pin
        self._pins = _each("pin", tuple(map(_Pins, pin)) if isinstance(pin, tuple) else _Pins(pin), self.slots)
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Let a copy of a pipeline have one of its own."""
        return HostMemory, ([*self.slots], self.slots_setting, self._pin, self.rests)

    @property
    def slots_setting(self) -> Slots:
        """The slots as a setting: a number if all devices have as many."""
        each = tuple(self.slots.values())
        return each[0] if len({*each}) == 1 else each

    def reduce_slots(self) -> str:
        """Take a slot from each device that has several, and return what that means; '' if no device has."""
        if max(self.slots.values(), default=1) < 2:
            return ""
        self.slots = {device: max(1, count - 1) for device, count in self.slots.items()}
        return f"slots={self.slots_setting} from now on, so weights may come later than they are needed"

    def up(self, device: torch.device) -> Stream:
        """Return the stream of a device that weights arrive on."""
        return self.side(device, "weights arriving")

    def down(self, device: torch.device) -> Stream:
        """Return the stream of a device that gradients leave on."""
        return self.side(device, "gradients leaving")

    def side(self, device: torch.device, purpose: str) -> Stream:
        """Return the stream of a device for a purpose."""
        return self.streams.side(device, purpose)

    def keep_frozen(self, weights: Iterable[tuple[Tensor, int]], devices: Sequence[torch.device]) -> None:
        """Decide where frozen weights stay: on devices that have room for all of theirs beside the slots.

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
        """Forget the frozen weights that stay: the model has changed one."""
        for by_partition in self._kept.values():
            for kept in by_partition.values():
                kept.forget()
        self._kept.clear()

    def alias(self, parameter: Tensor, device: torch.device, j: int) -> tuple[Tensor, FrozenCopy | None]:
        """Return a tensor like a parameter on a device, and its memory if it keeps that; otherwise it has none yet."""
        keeps = device in self._keeping and not parameter.requires_grad
        kept = self._kept.get(parameter, {}).get(j)
        if keeps and kept is not None and kept.fits(parameter, device):
            return kept.values, kept
        kept = None
        # A tensor of inference mode could not be saved for a later backward.
        with self.up(device).use(), torch.inference_mode(False):
            values = torch.empty_like(parameter.detach(), device=device)
            if keeps:
                kept = self._kept.setdefault(parameter, {})[j] = FrozenCopy(values, device)
            else:
                self._kept.pop(parameter, None)
                values.untyped_storage().resize_(0)
        return values, kept

    @torch.no_grad()
    def fill(self, alias: Tensor, parameter: Tensor, device: torch.device, kept: FrozenCopy | None = None) -> None:
        """Give an alias memory, and the values of its parameter, on the current stream.

        Args:
            alias: the alias
            parameter: the parameter
            device: the device, by the name that its partition has for it
            kept: the memory of the alias, if it keeps that, and is filled only if the parameter has changed
        """
        if kept is not None and kept.is_of(parameter):
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
            self._there[device] += bytes if kept is None else 0
            self.peaks[device] = max(self.peaks[device], self._there[device])
        if kept is not None:
            kept.note(parameter)

    def bring_down(self, grad: Tensor, stream: Stream) -> Tensor:
        """Return a gradient in host memory; it has arrived when ``stream``, which is the current one, is through."""
        with self._lock:
            self.bytes_down += grad.nbytes
        if grad.device.type == "cpu":
            return grad
        if grad.layout is not torch.strided:
            return grad.to("cpu")
        down = torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad, non_blocking=True)
        stream.record(grad)
        return down

    def came(self) -> None:
        """Count a partition whose weights have gone up."""
        with self._lock:
            self.uploads += 1

    def went(self, device: torch.device, bytes: int) -> None:
        """Count the weights of a partition that leave."""
        with self._lock:
            self._there[device] -= bytes


def empty(alias: Tensor) -> int:
    """Take the memory of an alias, and return its bytes."""
    storage = alias.untyped_storage()
    bytes = storage.nbytes()
    storage.resize_(0)
    return bytes


class FrozenCopy:
    """A frozen weight that stays on a device, and what is known of the parameter whose values it has."""

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self.values, self.device = values, device
        self._seen: tuple[int, int] | None = None
        self._some = values

    def fits(self, parameter: Tensor, device: torch.device) -> bool:
        """Return whether a parameter has room here as it is."""
        values = self.values
        layout = device, parameter.shape, parameter.dtype, parameter.stride()
        return (self.device, values.shape, values.dtype, values.stride()) == layout

    def forget(self) -> None:
        """Forget what the values are, so that they come again."""
        self._seen = None

    def is_of(self, parameter: Tensor) -> bool:
        """Return whether the parameter is as it was noted."""
        seen, some = self._state(parameter)
        return seen == self._seen and torch.equal(some, self._some)

    def note(self, parameter: Tensor) -> None:
        """Note what the parameter is."""
        self._seen, some = self._state(parameter)
        self._some = some.clone()

    def _state(self, parameter: Tensor) -> tuple[tuple[int, int], Tensor]:
        # Adapters are merged by a change of `.data`, which leaves the version as it is. A few elements tell.
        some = parameter.detach().reshape(-1)[:: max(1, parameter.numel() // 16)]
        return (versions([parameter])[0], parameter.data_ptr()), some


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
            finalize(storage, self._known.discard, address)
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
                finalize(storage, self._unpin, runtime, address, bytes)
            else:
                # The memory works without. But CUDA keeps the error, and the next launch of this thread would raise it.
                with suppress(RuntimeError):
                    torch.ones(1, device="cuda").add_(1)

    def _unpin(self, runtime: Any, address: int, bytes: int) -> None:
        runtime.cudaHostUnregister(address)
        with self._lock:
            self._left = (self._left or 0) + bytes


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
        ValueError: ``offload`` is none of its values, there is no slot, or ``pin`` is negative.
    """
    if offload not in (True, False, "weights"):
        raise ValueError(f"offload must be True, 'weights' or False, but got {offload!r}")
    if not offload:
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


def _each(name: str, setting: T | tuple[T, ...], devices: Iterable[torch.device]) -> dict[torch.device, T]:
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
        ValueError: a parameter is on a device, or is no plain tensor.
    """
    for name, parameter in named:
        if parameter is None:
            continue
        if is_lazy(parameter) or type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            raise ValueError(
                f"'{name}' is a {type(parameter).__name__} ({parameter.layout}), whose values offload=True cannot copy "
                "as those of a plain parameter; let the model run once if it is lazy, load it without quantization, or "
                "leave out offload"
            )
        if parameter.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"'{name}' is on {parameter.device}, but under offload=True weights live in host memory; load the "
                "model on the CPU, or move it there: model.cpu()"
            )


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
    slots_of = _each("slots", slots, devices)
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
