"""The outputs of a mini-batch in the caller's graph, where one autograd node stands for all of it.

The outputs of micro-batches are cut from the graphs of their cells, or the engine would walk from the caller's graph
into those. They are the outputs of the node; its inputs are the parameters that are trained and the inputs that require
grad. So autograd itself adds to ``.grad``, calls hooks once, and serves ``torch.autograd.grad``; and the caller's graph
and those of the cells are apart, which may be differentiated in other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.batch.outputs import verify_known
from torchgpipe.cell.cell import Export
from torchgpipe.devices.torch_internals import has_gradient_hooks, is_batched, keeps_graph
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.graph.function import Function
from torchgpipe.graph.phony import get_phony
from torchgpipe.model.values import each, mapped
from torchgpipe.processes.stand_in import StandIn
from torchgpipe.run.mini_batch import MiniBatch
from torchgpipe.run.visitors import unobserved
from torchgpipe.spine.abstract import values_told

__all__ = ["Exported", "Outer"]


class Exported:
    """The outputs of a mini-batch.

    Args:
        m: the number of micro-batches
    """

    def __init__(self, m: int) -> None:
        self._outputs: list[Any] = [None] * m
        #: For each micro-batch, by their ids: the tensors that require grad, with their exports.
        self._exports: list[dict[int, tuple[Tensor, Export]]] = [{} for _ in range(m)]

    def take(self, i: int, output: Any, export: Callable[[Tensor], Export] | None) -> None:
        """Take the output of micro-batch ``i``."""
        self._outputs[i] = output
        if export is None:
            return
        verify_known(output)
        with unobserved():  # Nothing of this has to be imported, and each operation would look for it.
            for _, tensor in each(output):
                if tensor.requires_grad and id(tensor) not in self._exports[i]:
                    self._exports[i][id(tensor)] = (tensor, export(tensor))

    def values(self, *, gather: bool) -> list[list[Tensor | None]]:
        """Return what other processes are told of the outputs: the values of numbers, or of all tensors."""
        return [values_told(output, gather=gather) for output in self._outputs]

    def fill(self, values: Sequence[Sequence[Tensor | None]]) -> None:
        """Put the values that another process has told in the place of stand-ins."""
        for i, output in enumerate(self._outputs):
            filled = {
                id(tensor): tensor if value is None else value.to(tensor.device).requires_grad_(tensor.requires_grad)
                for (_, tensor), value in zip(each(output), values[i])
                if isinstance(tensor, StandIn)
            }
            self._outputs[i] = _exchanged(output, filled)
            exports = [(filled.get(key, tensor), export) for key, (tensor, export) in self._exports[i].items()]
            self._exports[i] = {id(tensor): (tensor, export) for tensor, export in exports}

    def in_graph_of_caller(self, mini_batch: MiniBatch) -> list[Any]:
        """Return the outputs with one node that stands for the mini-batch."""
        pairs = [(tensor.detach(), export) for exports in self._exports for tensor, export in exports.values()]
        if not pairs:
            return self._outputs
        tensors, exports = zip(*pairs)
        inputs = [tensor for tensor, _ in mini_batch.inputs_with_grad()]
        trained = _trained_by(mini_batch)
        outside: list[Tensor] = []
        if not trained and not any([tensor.requires_grad for tensor in inputs]):
            # All of this is frozen, and leaves outside of the model are trained, as adapters in a network of their own.
            outside = [get_phony(torch.device("cpu")).requires_grad_()]
        outer = iter(Outer.apply(mini_batch, trained, exports, *tensors, *trained, *inputs, *outside))
        return [
            _exchanged(output, {key: next(outer) for key in exports})
            for output, exports in zip(self._outputs, self._exports)
        ]


class Outer(Function):
    """Forward: the outputs, now a part of the caller's graph. Backward: the backward half of the mini-batch.

    Its arguments are the mini-batch, the parameters that get a gradient, the exports of the outputs, the
    outputs, these parameters once more, the inputs that require grad, and a leaf if there are neither.
    """

    @staticmethod
    def forward(
        ctx: Any, mini_batch: MiniBatch, trained: Sequence[Tensor], exports: Sequence[Export], *tensors: Tensor
    ) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.mini_batch, ctx.trained, ctx.exports = mini_batch, trained, exports
        return tuple([tensor.detach() for tensor in tensors[: len(exports)]])

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True cannot go through a pipelined model; leave it out, or use model.unpipelined()"
            )
        if any([grad is not None and is_batched(grad) for grad in grads]):
            raise RuntimeError(
                "several gradients at once (is_grads_batched=True, vectorize=True) cannot go back through a "
                "pipelined model; give one after the other, as jacobian(..., vectorize=False) does, or use "
                "model.unpipelined()"
            )
        keep = keeps_graph()
        mini_batch: MiniBatch | None = ctx.mini_batch
        if mini_batch is None:
            raise RuntimeError(
                "the graph of this pipelined model has been differentiated and freed; give retain_graph=True to the "
                "backward before, or run the model again"
            )
        if not keep:
            ctx.mini_batch = None
        mini_batch.aliases.verify_apart()
        try:
            for export, grad in zip(ctx.exports, grads):
                export.add(grad)
            mini_batch.run_backward_half(keep_graph=keep)
        except BaseException:
            ctx.mini_batch = None  # A part of its graph is used up.
            mini_batch.aliases.take()
            raise
        inputs = [source.total() for _, source in mini_batch.inputs_with_grad()]
        sums = dict(zip(mini_batch.aliases.trained, mini_batch.aliases.take()))
        parameters = [sums[parameter] for parameter in ctx.trained]
        outside = [None] * (len(ctx.needs_input_grad) - 3 - len(grads) - len(parameters) - len(inputs))
        return (None, None, None, *[None] * len(grads), *parameters, *inputs, *outside)


def _trained_by(mini_batch: MiniBatch) -> list[Tensor]:
    """Return the trained parameters, but for those with hooks that this mini-batch has not used.

    Autograd calls the hooks of an input also when its gradient is None, and an optimizer that steps in a hook would
    move a layer that was not used. Looking at the graphs takes long, so that only hooks are worth it.
    """
    aliases = mini_batch.aliases
    if not any(map(has_gradient_hooks, aliases.trained)):
        return aliases.trained
    used = aliases.used(mini_batch.leaves())
    return [parameter for parameter in aliases.trained if parameter in used or not has_gradient_hooks(parameter)]


def _exchanged(output: Any, tensors: dict[int, Tensor]) -> Any:
    return mapped(output, lambda tensor: tensors.get(id(tensor), tensor))
