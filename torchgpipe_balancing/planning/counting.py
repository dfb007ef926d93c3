"""Count what each layer holds of a micro-batch for backward.

A hook of autograd sees every tensor that is saved for backward, in whatever thread; hooks of the layers tell which
layer is running there. Each memory counts once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices.memory import storages_of
from torchgpipe.model.values import each
from torchgpipe_balancing.held import Saved, SavedTensors
from torchgpipe_balancing.planning.model_under_test import ModelUnderTest
from torchgpipe_balancing.planning.problem import Layer

__all__ = ["count_bytes"]


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


class _Counter(ExitStack):
    """Count for each layer, at the end of forward: what autograd has dropped until then is not kept."""

    def __init__(self, tested: ModelUnderTest) -> None:
        super().__init__()
        self._running = threading.local()
        self._owned = set(storages_of([tensor for owned in tested.owned() for tensor in owned]))
        self._saved = [SavedTensors() for _ in tested.layers]
        self._kept: list[dict[int, int]] | None = None
        self._inputs: dict[int, dict[int, int]] = {}
        self._waiting = [0] * len(tested.layers)
        self._lock = threading.Lock()
        for k, names in enumerate(tested.layers):
            for module in map(tested.module, names):
                self.callback(module.register_forward_pre_hook(partial(self._enter, k), with_kwargs=True).remove)
                for child in module.modules():
                    if any(parameter.requires_grad for parameter in child.parameters(recurse=False)):
                        self.callback(child.register_forward_hook(partial(self._add_waiting, k)).remove)
        self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))

    def _enter(self, k: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.layer = k
        memories = storages_of([tensor for _, tensor in each((args, kwargs))])
        self._inputs.setdefault(k, memories)
        if k == 0:
            self._owned |= memories.keys()  # The mini-batch is the caller's.

    def _add_waiting(self, k: int, module: nn.Module, args: Any, output: Any) -> None:
        # The gradient that waits for the second half of backward is as large as the output.
        self._waiting[k] += sum([tensor.nbytes for _, tensor in each(output) if tensor.requires_grad])

    def _pack(self, tensor: Tensor) -> Saved:
        return self._saved[getattr(self._running, "layer", 0)].pack(tensor)

    def _unpack(self, saved: Saved) -> Tensor:
        self._end_forward()
        return saved.tensor

    def _end_forward(self) -> None:
        with self._lock:
            if self._kept is None:
                self._kept = [saved.memories() for saved in self._saved]

    def result(self) -> list[Layer]:
        """Return what was counted."""
        self._end_forward()
        assert self._kept is not None
        of_layers = [self._unowned(memories) for memories in self._kept]
        inputs = [*[self._unowned(self._inputs.get(k, {})) for k in range(len(of_layers))], {}]
        known, layers = set[int](), list[Layer]()
        for k, (memories, waiting) in enumerate(zip(of_layers, self._waiting)):
            behind = {key: size for later in of_layers[k:] for key, size in later.items()}
            copied = sum([behind[key] for key in behind.keys() & known])
            used = {key for later in (*of_layers[k + 1 :], *inputs[k + 1 :]) for key in later}
            # Where a layer is recomputed, what layers behind it use of its memories is kept all the same.
            again = inputs[k] | {key: memories[key] for key in memories.keys() & used}
            kept, input = [sum([size for key, size in of.items() if key not in known]) for of in (memories, again)]
            crossing = sum(inputs[k + 1].values())
            layers.append(Layer(kept=kept, again=copied, input=input, waiting=waiting, crossing=crossing))
            known |= memories.keys()
        return layers

    def _unowned(self, memories: dict[int, int]) -> dict[int, int]:
        return {key: size for key, size in memories.items() if key not in self._owned}
