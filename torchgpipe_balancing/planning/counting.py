"""Count activations: what each layer holds for backward, and the most that each device holds during a step.

A hook of autograd sees every tensor that is saved for backward, in whatever thread; hooks of the layers tell which
layer is running there. So devices that share the memory of the CPU are told apart. Each memory counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchgpipe.devices.memory import storages_of
from torchgpipe.devices.torch_internals import storage_key
from torchgpipe.model.values import each
from torchgpipe_balancing.held import HeldBytes, Saved
from torchgpipe_balancing.planning.model_under_test import ModelUnderTest
from torchgpipe_balancing.planning.problem import Layer

__all__ = ["activation_peaks", "count_bytes"]


def count_bytes(tested: ModelUnderTest, run: Callable[[], Any]) -> list[Layer]:
    """Return the bytes of a micro-batch that each layer holds. What several layers keep counts for the first of them.

    Args:
        tested: the model
        run: runs forward of one micro-batch, and perhaps its backward
    """
    with _Counter(tested) as counter:
        loss = run()  # Whose graph is alive as long as it is.
        layers = counter.result()
        del loss
    return layers


def activation_peaks(
    tested: ModelUnderTest, places: Sequence[int], recomputed: Collection[int], run: Callable[[], Any]
) -> list[int]:
    """Return the most bytes of activations that each device holds.

    Args:
        tested: the model
        places: the index of the device of each layer
        recomputed: the positions of the layers that are recomputed
        run: runs a step
    """
    devices = [HeldBytes() for _ in range(1 + max(places))]
    with _Peaks(tested, [devices[place] for place in places], recomputed):
        run()
    return [device.peak for device in devices]


class _Watch(ExitStack):
    """Hooks that count what autograd saves in each layer at the place of that layer."""

    def __init__(self, tested: ModelUnderTest, places: Sequence[HeldBytes]) -> None:
        super().__init__()
        self._running = threading.local()
        self._places = places
        self._owned = set(storages_of([tensor for owned in tested.owned() for tensor in owned]))
        for k, names in enumerate(tested.layers):
            for module in map(tested.module, names):
                self.callback(module.register_forward_pre_hook(partial(self._enter, k), with_kwargs=True).remove)
        self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))

    def _enter(self, k: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.layer = k
        found = each((args, kwargs))
        tensors = {storage_key(tensor): tensor for _, tensor in found if tensor.layout is torch.strided}
        if k == 0:
            self._owned |= tensors.keys()  # The mini-batch is the caller's.
        self._entered(k, tensors)

    def _entered(self, k: int, inputs: dict[int, Tensor]) -> None:
        raise NotImplementedError

    def _pack(self, tensor: Tensor) -> Saved:
        place = self._places[getattr(self._running, "layer", 0)]
        return Saved(tensor, None if self._owned.intersection(storages_of([tensor])) else place)

    def _unpack(self, saved: Saved) -> Tensor:
        return saved.tensor


class _Counter(_Watch):
    """Count for each layer, at the end of forward: what autograd has dropped until then is not kept."""

    def __init__(self, tested: ModelUnderTest) -> None:
        self._kept: list[dict[int, int]] | None = None
        self._inputs: dict[int, dict[int, int]] = {}
        self._waiting = [0] * len(tested.layers)
        self._lock = threading.Lock()
        super().__init__(tested, [HeldBytes() for _ in tested.layers])
        for k, names in enumerate(tested.layers):
            for child in [child for name in names for child in tested.module(name).modules()]:
                if any(parameter.requires_grad for parameter in child.parameters(recurse=False)):
                    self.callback(child.register_forward_hook(partial(self._add_waiting, k)).remove)

    def _entered(self, k: int, inputs: dict[int, Tensor]) -> None:
        if k not in self._inputs:
            self._inputs[k] = storages_of(inputs.values())

    def _add_waiting(self, k: int, module: nn.Module, args: Any, output: Any) -> None:
        # The gradient that waits for the second half of backward is as large as the output.
        self._waiting[k] += sum([tensor.nbytes for _, tensor in each(output) if tensor.requires_grad])

    def _unpack(self, saved: Saved) -> Tensor:
        self._end_forward()
        return saved.tensor

    def _end_forward(self) -> None:
        with self._lock:
            if self._kept is None:
                self._kept = [dict(place.memories) for place in self._places]

    def result(self) -> list[Layer]:
        """Return what was counted."""
        self._end_forward()
        assert self._kept is not None
        of_layers = [self._unowned(memories) for memories in self._kept]
        inputs = [sum(self._unowned(self._inputs.get(k, {})).values()) for k in range(len(of_layers))]
        known: set[int] = set()
        kept, again = [], []
        for k, memories in enumerate(of_layers):
            kept.append(sum([memories[key] for key in memories.keys() - known]))
            behind = {key: size for later in of_layers[k:] for key, size in later.items()}
            again.append(sum([behind[key] for key in behind.keys() & known]))
            known |= memories.keys()
        # Where a layer is recomputed, what layers behind it have saved of its output is kept all the same.
        recomputed = [size + saved for size, saved in zip(inputs, [*again[1:], 0])]
        sizes = zip(kept, again, recomputed, self._waiting, [*inputs[1:], 0])
        return [Layer(kept=k, again=a, input=i, waiting=w, crossing=c) for k, a, i, w, c in sizes]

    def _unowned(self, memories: dict[int, int]) -> dict[int, int]:
        return {key: size for key, size in memories.items() if key not in self._owned}


class _Peaks(_Watch):
    """Count as a step goes on.

    Layers that are recomputed hold their inputs past autograd: their first run begins to hold them, and their second
    run ends it.
    """

    def __init__(self, tested: ModelUnderTest, places: Sequence[HeldBytes], recomputed: Collection[int]) -> None:
        self._held: dict[int, dict[int, Tensor]] = {k: {} for k in recomputed}
        super().__init__(tested, places)

    def _entered(self, k: int, inputs: dict[int, Tensor]) -> None:
        # What recomputation saves of its input, it saves last before the layer, and not for the layer before.
        saved = vars(self._running).pop("saved", {})
        if k not in self._held:
            return
        held, place = self._held[k], self._places[k]
        for key, tensor in inputs.items():
            if key in held:
                place.drop(held.pop(key))
                continue
            if k:
                held[key] = tensor.detach()
                place.hold(tensor)
            if key in saved:
                saved[key].move(place if k else None)

    def _pack(self, tensor: Tensor) -> Saved:
        saved = super()._pack(tensor)
        if saved.place is not None and tensor.layout is torch.strided:
            vars(self._running).setdefault("saved", WeakValueDictionary())[storage_key(tensor)] = saved
        return saved
