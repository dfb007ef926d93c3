"""The gradients of parameters in a call: straight into ``.grad``, or, where anything listens, there once and whole.

A cell with a graph of its own is differentiated by a backward pass inside the pass of the caller:

    forward   parameters ──► Deliver ──phony──► cell (0,j), cell (1,j), ...
    backward  each cell differentiates its own graph; Deliver runs after the last of them

Mostly nothing listens. Then the inner pass adds each gradient to ``.grad`` as soon as the gradient is computed, and
Deliver has nothing to do. A tensor that a layer has captured gets its gradient in the same way.

But a hook of a parameter, and DistributedDataParallel, must see the gradient of the whole mini-batch, once; and
`torch.autograd.grad` and `backward(inputs=...)` must leave every other ``.grad`` as it is. Then the gradients of the
cells are summed beside ``.grad``, and Deliver returns the sums to the engine, which does the rest. That costs another
set of gradients for the sums, and one more while a cell is differentiated.

The engine calls the hooks of a parameter without a sum, too, and there an optimizer would step. So that is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import active_data_parallel, current_pass, has_gradient_hooks, will_run
from torchgpipe.devices.typing import Leaf
from torchgpipe.gradients.sums import add_to_grad, captured_by, differentiate_into, refusal
from torchgpipe.graph.function import Edge, Function, unshared
from torchgpipe.graph.phony import get_phony
from torchgpipe.graph.unheard import refuse_unheard

__all__ = ["ParameterGradients"]


class ParameterGradients:
    """The gradients of the parameters of a partition during a call of the pipeline.

    Args:
        parameters: the parameters; each requires grad
        frozen: the parameters that do not
        device: where they are

    Attributes:
        phony: an input of every cell that is differentiated here
    """

    __slots__ = ("_frozen", "_leaf", "_listens_always", "_parameters", "_sums", "phony")

    def __init__(self, parameters: Sequence[Tensor], frozen: Sequence[Tensor], device: torch.device) -> None:
        self._parameters, self._frozen = parameters, frozen
        # The hooks of DistributedDataParallel cannot be seen.
        self._listens_always = active_data_parallel() is not None or not all([one.is_leaf for one in parameters])
        #: By backward pass, the sum of each parameter's gradients; None in a pass that was found to have no listener.
        #: What a pass that fails leaves goes with the graph.
        self._sums: dict[int, list[Leaf] | None] = {}
        leaf = get_phony(device).requires_grad_()
        self.phony: Tensor = Deliver.apply(self._sums, leaf, *parameters)
        node: Any = self.phony.grad_fn
        #: The node at which the gradient of the leaf arrives.
        self._leaf = node.next_functions[-len(parameters) - 1][0]

    def differentiate(
        self, roots: Sequence[Edge], grads: Sequence[Tensor], leaves: Sequence[Tensor], *, keep_graph: bool
    ) -> list[Leaf]:
        """Differentiate the graph of a cell, and take the gradients of parameters to where the current pass needs them.

        Args:
            roots: where the graph is entered
            grads: a gradient for each root
            leaves: the inputs of the cell that require grad
            keep_graph: whether the graph will be differentiated again

        Returns:
            the gradients of the leaves; None for one that was not used

        Raises:
            RuntimeError: the cell uses a tensor that is neither among the leaves nor among the parameters, and the
                gradient of that tensor would be lost, or arrive in parts where a hook listens.
        """
        this, owned = current_pass(), (*self._parameters, *self._frozen)
        if this not in self._sums and self._nothing_listens():
            for tensor in captured_by(roots, [*leaves, *owned]):
                if has_gradient_hooks(tensor):
                    raise refusal(tensor)
            self._sums[this] = None
        if this not in self._sums and will_run(self.phony.grad_fn):
            self._sums[this] = [None] * len(self._parameters)
        sums = self._sums.get(this, [])
        if sums is None:
            with unshared(owned):
                return add_to_grad(owned, roots, grads, leaves, keep_graph=keep_graph)
        return differentiate_into(sums, owned, roots, grads, leaves, keep_graph=keep_graph)

    def _nothing_listens(self) -> bool:
        """Return whether this pass asks for all gradients, and nothing must see them whole."""
        return (
            will_run(self._leaf)  # A pass that names its inputs does not ask for the leaf.
            and not self._listens_always
            # One that was frozen at the call gets no gradient, also if it no longer is.
            and not any([parameter.requires_grad for parameter in self._frozen])
            and not any([has_gradient_hooks(parameter) for parameter in self._parameters])
        )


class Deliver(Function):
    """Forward: a phony for all cells that are differentiated here. Backward: the sums, if the pass has any."""

    @staticmethod
    def forward(ctx: Any, sums: dict[int, list[Leaf] | None], leaf: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sums = sums
        return get_phony(leaf.device)

    @staticmethod
    def backward(ctx: Any, _phony: Tensor | None) -> tuple[Tensor | None, ...]:
        (leaf, _), *ends = ctx.next_functions
        sums = ctx.sums.pop(current_pass(), [None] * len(ends))
        if sums is not None and will_run(leaf):  # Else the pass names its inputs, and steps nothing.
            refuse_unheard(ends, sums)
        return None, None, *(sums or [None] * len(ends))
