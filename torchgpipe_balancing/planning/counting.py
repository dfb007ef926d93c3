"""Count the bytes that each layer holds for backward, and that go from layer to layer.

A hook of autograd sees every tensor that is saved for backward, in whatever thread; hooks of the layers tell which
layer is running there. Each memory counts once, for the first layer that keeps it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import storage_key
from torchgpipe.model.values import each
from torchgpipe_balancing.planning.subject import Subject

__all__ = ["Bytes", "counted"]


class Bytes(NamedTuple):
    """What a layer holds of one micro-batch, in bytes; see `problem.Layer`."""

    kept: int
    again: int
    input: int
    waiting: int
    crossing: int


def counted(subject: Subject, run: Callable[[], Any]) -> list[Bytes]:
    """Return what each layer holds.

    Args:
        subject: the model
        run: runs forward of one micro-batch, and perhaps its backward
    """
    with _Counter(subject) as counter:
        loss = run()  # Whose graph is alive as long as it is.
        found = counter.result()
        del loss
    return found


class _Saved:
    """A tensor that autograd has saved, in a class that can be referred to weakly."""

    def __init__(self, tensor: Tensor, layer: int) -> None:
        # Detached, because an operation that saves its output would otherwise hold itself.
        self.tensor = tensor.detach()
        self.layer = layer


class _Counter(ExitStack):
    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._running = threading.local()
        #: Weak, because a tensor that autograd drops in forward is not kept.
        self._saved: WeakSet[_Saved] = WeakSet()
        #: What is kept at the end of forward: for each layer, the bytes of each memory.
        self._kept: list[dict[int, int]] | None = None
        self._lock = threading.Lock()
        n = len(subject.layers)
        self._inputs: list[dict[int, int] | None] = [None] * n
        self._waiting = [0] * n
        self._owned = {storage_key(tensor) for own in subject.owned() for tensor in own}
        for k, names in enumerate(subject.layers):
            for name in names:
                self._watch(subject.module(name), k)
        self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))

    def _watch(self, module: nn.Module, k: int) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.layer = k
            if self._inputs[k] is None:
                self._inputs[k] = _bytes([tensor for _, tensor in each((args, kwargs))])

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            # The gradient that waits for the second half of backward is as large as the output.
            self._waiting[k] += sum([tensor.nbytes for _, tensor in each(output) if tensor.requires_grad])

        self.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        for child in module.modules():
            if any(parameter.requires_grad for parameter in child._parameters.values() if parameter is not None):
                self.callback(child.register_forward_hook(leave).remove)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, getattr(self._running, "layer", 0))
        with self._lock:
            self._saved.add(saved)
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        self._end_forward()
        return saved.tensor

    def _end_forward(self) -> None:
        with self._lock:
            if self._kept is None:
                self._kept = [{} for _ in self._inputs]
                for saved in self._saved:
                    self._kept[saved.layer] |= _bytes([saved.tensor])

    def result(self) -> list[Bytes]:
        """Return what was counted."""
        self._end_forward()
        assert self._kept is not None
        inputs = [own or {} for own in self._inputs]
        callers = {*self._owned, *inputs[0]}
        known = set(callers)
        kept = []
        for own in self._kept:
            kept.append(sum([own[key] for key in own.keys() - known]))
            known |= own.keys()
        again: list[int] = []
        behind: dict[int, int] = {}  # What the layers from the present one on keep.
        for k in reversed(range(len(kept))):
            behind |= self._kept[k]
            before = {key for own in self._kept[:k] for key in own} - callers
            again.insert(0, sum([size for key, size in behind.items() if key in before]))
        sizes = [sum([size for key, size in own.items() if key not in self._owned]) for own in inputs]
        # Where a layer is recomputed, what layers behind it have saved of its output is kept all the same.
        return [
            Bytes(kept[k], again[k], sizes[k] * (k > 0) + [*again[1:], 0][k], self._waiting[k], [*sizes[1:], 0][k])
            for k in range(len(kept))
        ]


def _bytes(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the bytes of the memory behind each tensor."""
    return {
        storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.layout is torch.strided
    }
