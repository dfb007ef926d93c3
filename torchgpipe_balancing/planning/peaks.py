"""Count the most activations that each device holds during a step, also where devices share the memory of the CPU.

A hook of autograd sees what is saved for backward. Layers that are recomputed hold their inputs past autograd: their
first run begins to hold them, and their second run ends it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import storage_key
from torchgpipe.model.values import each
from torchgpipe_balancing.planning.subject import Subject

__all__ = ["HeldBytes", "activation_peaks"]


def activation_peaks(
    subject: Subject, places: Sequence[int], recomputed: Collection[int], run: Callable[[], Any]
) -> list[int]:
    """Return the most bytes of activations that each device holds.

    Args:
        subject: the model
        places: the index of the device of each layer
        recomputed: the positions of the layers that are recomputed
        run: runs a step
    """
    with _Watch(subject, places, recomputed) as watch:
        run()
    return [device.peak for device in watch.devices]


class HeldBytes:
    """The bytes that a device holds; each memory counts once.

    Attributes:
        peak: the most bytes so far
    """

    def __init__(self) -> None:
        self.peak = 0
        self._bytes = 0
        self._holders: Counter[int] = Counter()
        # The collector may drop a tensor in the midst of `hold`.
        self._lock = threading.RLock()

    def hold(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, once more."""
        with self._lock:
            key = storage_key(tensor)
            self._holders[key] += 1
            if self._holders[key] == 1:
                self._bytes += tensor.untyped_storage().nbytes()
                self.peak = max(self.peak, self._bytes)

    def drop(self, tensor: Tensor) -> None:
        """Count the memory of a tensor once less."""
        with self._lock:
            key = storage_key(tensor)
            self._holders[key] -= 1
            if not self._holders[key]:
                self._bytes -= tensor.untyped_storage().nbytes()
                del self._holders[key]


class _Saved:
    """A tensor that autograd has saved."""

    def __init__(self, device: HeldBytes, tensor: Tensor) -> None:
        # Detached, because an operation that saves its output would otherwise hold itself.
        self.tensor = tensor.detach()
        self._device: HeldBytes | None = device
        device.hold(self.tensor)

    def move(self, device: HeldBytes | None) -> None:
        """Count on another device from now on, or not at all."""
        if device is not None:
            device.hold(self.tensor)
        if self._device is not None:
            self._device.drop(self.tensor)
        self._device = device

    def __del__(self) -> None:
        if self._device is not None:
            self._device.drop(self.tensor)


class _Watch(ExitStack):
    def __init__(self, subject: Subject, places: Sequence[int], recomputed: Collection[int]) -> None:
        super().__init__()
        self.devices = [HeldBytes() for _ in range(1 + max(places))]
        self._running = threading.local()
        self._owned = {storage_key(tensor) for own in subject.owned() for tensor in own}
        self._places = places
        for k, names in enumerate(subject.layers):
            for module in map(subject.module, names):
                self._watch(module, k, k in recomputed)
        self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor))

    def _watch(self, module: nn.Module, k: int, is_recomputed: bool) -> None:
        held: dict[int, Tensor] = {}
        device = self.devices[self._places[k]]

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.layer = k
            # What recomputation saves of its input, it saves last before the layer, and not for the layer before.
            saved = vars(self._running).pop("saved", {})
            for _path, tensor in each((args, kwargs)):
                key = storage_key(tensor)
                if k == 0:
                    self._owned.add(key)  # The mini-batch is the caller's.
                elif not is_recomputed:
                    continue
                elif key in held:
                    device.drop(held.pop(key))
                    continue
                else:
                    held[key] = tensor.detach()
                    device.hold(tensor)
                if is_recomputed and key in saved:
                    saved[key].move(device if k else None)

        self.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)

    def _pack(self, tensor: Tensor) -> Any:
        device = self.devices[self._places[getattr(self._running, "layer", 0)]]
        if storage_key(tensor) in self._owned:
            return _Plain(tensor)
        saved = _Saved(device, tensor)
        vars(self._running).setdefault("saved", WeakValueDictionary())[storage_key(tensor)] = saved
        return saved


class _Plain:
    """A tensor that does not count."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
