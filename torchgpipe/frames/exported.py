"""The outputs of micro-batches, cut from the graphs of their cells, and tied to the one node of the caller's graph.

Without the cut, the engine would walk from the caller's graph into those of the cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchgpipe.devices.torch_internals import has_gradient_hooks
from torchgpipe.engine.aliases import Aliases
from torchgpipe.frames.cell import Export
from torchgpipe.frames.mini_batch import MiniBatch
from torchgpipe.frames.outer import Outer
from torchgpipe.frames.outputs import verify_known
from torchgpipe.model.values import mapped

__all__ = ["Exported"]


class Exported:
    """The outputs of a mini-batch.

    Args:
        m: the number of micro-batches
        backward: whether backward follows
    """

    def __init__(self, m: int, *, backward: bool) -> None:
        self._outputs: list[Any] = [None] * m
        self._backward = backward
        #: For each micro-batch, by their ids: the tensors that require grad, with their exports.
        self._exports: list[dict[int, tuple[Tensor, Export]]] = [{} for _ in range(m)]

    def take(self, i: int, output: Any, export: Callable[[Tensor], Export]) -> None:
        """Take the output of micro-batch ``i``."""
        self._outputs[i] = output
        if self._backward:
            verify_known(output)
            own = self._exports[i]

            def note(tensor: Tensor) -> Tensor:
                if tensor.requires_grad and id(tensor) not in own:
                    own[id(tensor)] = (tensor, export(tensor))
                return tensor

            mapped(output, note)

    def in_graph_of_caller(self, mini_batch: MiniBatch, aliases: Aliases) -> list[Any]:
        """Return the outputs with one node that stands for the mini-batch."""
        found = [(tensor.detach(), export) for own in self._exports for tensor, export in own.values()]
        if not found:
            return self._outputs
        tensors, exports = zip(*found)
        inputs = [tensor for tensor, _ in mini_batch.inputs_with_grad()]
        trained = _heard(mini_batch, aliases)
        outer = iter(Outer.apply(mini_batch, aliases, trained, exports, *tensors, *trained, *inputs))
        return [
            _exchanged(output, {key: next(outer) for key in own}) for output, own in zip(self._outputs, self._exports)
        ]


def _heard(mini_batch: MiniBatch, aliases: Aliases) -> list[Tensor]:
    """Return the trained parameters, but for those with hooks that this mini-batch has not used.

    Autograd calls the hooks of an input also when its gradient is None, and an optimizer that steps in a hook would
    move a layer that was not used. Looking at the graphs takes long, so that only hooks are worth it.
    """
    if not any(map(has_gradient_hooks, aliases.trained)):
        return aliases.trained
    used = aliases.used(mini_batch.leaves())
    return [one for one in aliases.trained if one in used or not has_gradient_hooks(one)]


def _exchanged(output: Any, tensors: dict[int, Tensor]) -> Any:
    return mapped(output, lambda tensor: tensors.get(id(tensor), tensor))
