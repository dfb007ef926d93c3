"""Take the times of a layer: forward, recomputation and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import pytree
from torchgpipe_balancing.walk import Input, Output, gradients_of, run, tensors_in

__all__ = ["Timer", "Times"]

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """The times of a layer for the sample, in seconds.

    Attributes:
        forward: forward, which builds the graph for backward
        recompute: what checkpointing adds: one forward without a graph; 0 if nothing is recomputed
        backward: backward; 0 if the output needs no gradient
    """

    forward: float
    recompute: float
    backward: float

    def total(self, *, recompute: bool = True) -> float:
        """Return the seconds for forward and backward, with recomputation or without."""
        return self.forward + self.backward + (self.recompute if recompute else 0.0)


class Timer:
    """Time the runs of a layer for one input."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, layer: nn.Module, input: Input) -> tuple[Output, Times]:
        trained = any(tensor.requires_grad for tensor in chain(layer.parameters(), tensors_in(input)))

        # Layers may work in place, so every run but the last gets an input of its own.
        with torch.no_grad():
            run(layer, _cloned(input))  # The first run of a copy is slower.
            recompute = self._timed(run, layer, _cloned(input))[1] if trained else 0.0

        output, forward = self._timed(run, layer, input)
        tensors, gradients = gradients_of(output)
        backward = self._timed(torch.autograd.backward, tensors, gradients)[1] if tensors else 0.0
        return output, Times(forward, recompute, backward)

    def _timed(self, function: Callable[..., T], *args: Any) -> tuple[T, float]:
        """Call a function, and return its result and the seconds that the device took."""
        if self._device.type == "cpu":
            start = time.perf_counter()
            return function(*args), time.perf_counter() - start

        torch.accelerator.synchronize(self._device)
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        begin.record()
        result = function(*args)
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end) / 1000  # milliseconds


def _cloned(input: Input) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), input)
