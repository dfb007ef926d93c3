"""The gradients of parameters in a call: straight into ``.grad``, or, where anything listens, there once and whole.

A cell with a graph of its own is differentiated by a backward pass inside the pass of the caller:

    forward   parameters ──► Deliver ──phony──► cell (0,j), cell (1,j), ...
    backward  each cell differentiates its own graph; Deliver runs after the last of them

Mostly nothing listens. Then the inner pass adds each gradient to ``.grad`` as soon as the gradient is computed, and
Deliver has nothing to do. A tensor that a layer has captured gets its gradient in the same way.

But a hook of a parameter, and DistributedDataParallel, must see the gradient of the whole mini-batch, once; and
`torch.autograd.grad` and `backward(inputs=...)` must leave every other ``.grad`` as it is. Then the gradients of the
cells are summed beside ``.grad``, and Deliver returns the sums to the engine. That costs another set of gradients for
the sums, and one more while a cell is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import at_end_of_pass, current_pass, has_gradient_hooks, will_run
from torchgpipe.devices.typing import Leaf
from torchgpipe.gradients.sums import add_to_grad, captured_by, differentiate_into, refusal
from torchgpipe.graph.function import Edge, Function, unshared
from torchgpipe.graph.hooks import refuse_none
from torchgpipe.graph.phony import get_phony

__all__ = ["ParameterGradients"]


class ParameterGradients:
    """The gradients of the parameters of a partition during a call of the pipeline.

    Args:
        parameters: the parameters; each requires grad
        frozen: the parameters that do not
        device: where they are
        replicated: whether DistributedDataParallel is around the call, whose hooks cannot be seen

    Attributes:
        phony: an input of every cell that is differentiated here
    """

    __slots__ = ("_leaf", "_listens_always", "_owned", "_parameters", "_passes", "phony")

    def __init__(
        self, parameters: Sequence[Tensor], frozen: Sequence[Tensor], device: torch.device, *, replicated: bool
    ) -> None:
        self._parameters = parameters
        self._owned = (*parameters, *frozen)
        self._listens_always = replicated or not all([parameter.is_leaf for parameter in parameters])
        self._passes = _Passes()
        leaf = get_phony(device).requires_grad_()
        self.phony: Tensor = Deliver.apply(self._passes, leaf, *parameters)
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
        this = self._passes.current()
        if this is None:
            this = self._passes.begin(self._begin_pass(roots, leaves))
            at_end_of_pass(this.end)  # The pass alone keeps it, so a pass that fails drops its sums, too.
        if this.sums is not None:
            return differentiate_into(this.sums, self._owned, roots, grads, leaves, keep_graph=keep_graph)
        with unshared(self._owned):
            return add_to_grad(self._owned, roots, grads, leaves, keep_graph=keep_graph)

    def _begin_pass(self, roots: Sequence[Edge], leaves: Sequence[Tensor]) -> _Pass:
        """Decide for a backward pass, with its first cell, what becomes of gradients."""
        # A pass that names its inputs does not ask for the leaf.
        takes_all = will_run(self._leaf)
        if takes_all and not self._anything_listens():
            for tensor in captured_by(roots, [*leaves, *self._owned]):
                if has_gradient_hooks(tensor):
                    raise refusal(tensor)
            return _Pass(None)
        is_asked = takes_all or will_run(self.phony.grad_fn)
        return _Pass([None] * len(self._parameters) if is_asked else [])

    def _anything_listens(self) -> bool:
        """Return whether anything must see gradients whole, or a parameter that was frozen at the call is no more."""
        return (
            self._listens_always
            or any([parameter.requires_grad for parameter in self._owned[len(self._parameters) :]])
            or any([has_gradient_hooks(parameter) for parameter in self._parameters])
        )


class _Pass:
    """A backward pass of the caller.

    Attributes:
        sums: the sum of each parameter's gradients; empty if the pass asks for none of them; None if each cell adds to
            ``.grad``
    """

    def __init__(self, sums: list[Leaf] | None) -> None:
        self.sums = sums

    def end(self) -> None:
        """Drop the sums."""
        self.sums = []


class _Passes:
    """The backward passes that are under way.

    No `weakref.WeakValueDictionary`: it notices in Python that a pass has ended. Where the engine's threads have
    worked, that is the first Python that the waiting thread runs, so Ctrl-C would be raised there, and ignored.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, ref[_Pass]] = {}

    def current(self) -> _Pass | None:
        """Return the pass that this thread works for, if a cell was differentiated in it."""
        known = self._known.get(current_pass())
        return None if known is None else known()

    def begin(self, this: _Pass) -> _Pass:
        """Note the pass that this thread works for."""
        for number, known in list(self._known.items()):
            if known() is None:
                self._known.pop(number, None)
        self._known[current_pass()] = ref(this)
        return this


class Deliver(Function):
    """Forward: a phony for all cells that are differentiated here. Backward: the sums, if the pass has any."""

    @staticmethod
    def forward(ctx: Any, passes: _Passes, leaf: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.passes = passes
        return get_phony(leaf.device)

    @staticmethod
    def backward(ctx: Any, _phony: Tensor | None) -> tuple[Tensor | None, ...]:
        this = ctx.passes.current()
        sums = (this and this.sums) or [None] * (len(ctx.needs_input_grad) - 2)
        if this is None or this.sums:  # Else nothing listens, or nothing of this is asked for.
            for (node, _), grad in zip(ctx.next_functions[-len(sums) :], sums):
                if grad is None and type(node).__name__ == "AccumulateGrad":
                    refuse_none(node.variable)
        return None, None, *sums
