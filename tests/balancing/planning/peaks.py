"""Run a plan, and count the activations that each device holds at most: what a plan has predicted is set beside them.

A hook of autograd sees every tensor that is saved for backward, in whatever thread; hooks of the layers tell which
layer is running there. So devices that share the memory of the CPU are told apart. Each memory counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from tests.held import HeldBytes, Saved
from torchgpipe.devices.memory import storages_of
from torchgpipe.devices.torch_internals import storage_key
from torchgpipe.model.values import each
from torchgpipe_balancing import Plan
from torchgpipe_balancing.planning.candidates import most_partitions, problem_of
from torchgpipe_balancing.planning.check import config_of
from torchgpipe_balancing.planning.model_under_test import ModelUnderTest

__all__ = ["activation_peaks"]


def activation_peaks(plan: Plan, model: nn.Module) -> tuple[list[float], list[float]]:
    """Return the most bytes of activations that each device holds in a step: as predicted, and as counted.

    Gradients that wait between the halves of backward are not among them: hooks do not see those.
    """
    best, problem = plan.best, problem_of(plan.input, plan.best)
    seen = tuple([replace(layer, waiting=0.0, state=0.0) for layer in problem.layers])
    predicted = replace(problem, layers=seen).outcome(best.choice).memory
    most = most_partitions(plan.input.schedules, len(plan.input.devices))
    tested, config = ModelUnderTest(model, plan.sample, plan.target, most, plan.options), config_of(plan.input, best)
    pipeline, step = tested.pipeline(config)
    step(plan.input.batch)
    pipeline.zero_grad()
    devices = [HeldBytes() for _ in plan.input.devices]
    places = [devices[place] for place, count in zip(best.places, config.balance) for _ in range(count)]
    with _Peaks(tested, places, config.recomputed):
        step(plan.input.batch)
    return predicted, [float(device.peak) for device in devices]


class _Peaks(ExitStack):
    """Hooks that count what autograd saves in each layer at the place of that layer.

    Layers that are recomputed hold their inputs past autograd: their first run begins to hold them, and their second
    run ends it.
    """

    def __init__(self, tested: ModelUnderTest, places: Sequence[HeldBytes], recomputed: Collection[int]) -> None:
        super().__init__()
        self._held: dict[int, dict[int, Tensor]] = {k: {} for k in recomputed}
        self._running = threading.local()
        self._places = places
        self._owned = set(storages_of([tensor for owned in tested.owned() for tensor in owned]))
        for k, names in enumerate(tested.layers):
            for name in names:
                enter = partial(self._enter, k)
                self.callback(tested.module(name).register_forward_pre_hook(enter, with_kwargs=True).remove)
        self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor))

    def _enter(self, k: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.layer = k
        inputs = {storage_key(tensor): tensor for _, tensor in each((args, kwargs)) if tensor.layout is torch.strided}
        if k == 0:
            self._owned |= inputs.keys()  # The mini-batch is the caller's.
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
        place = self._places[getattr(self._running, "layer", 0)]
        saved = Saved(tensor, None if self._owned.intersection(storages_of([tensor])) else place)
        if saved.place is not None and tensor.layout is torch.strided:
            vars(self._running).setdefault("saved", WeakValueDictionary())[storage_key(tensor)] = saved
        return saved
