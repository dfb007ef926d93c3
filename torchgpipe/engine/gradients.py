"""Where the gradients of parameters go: straight into ``.grad``, or, where anything listens, there once and whole.

A cell that is a graph of its own is differentiated by a backward pass inside the pass of the caller:

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

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchgpipe.devices.backward_pass import at_end_of_pass, current_pass, will_run
from torchgpipe.devices.typing import Leaf
from torchgpipe.engine.function import Edge, Function, accumulate, gradients
from torchgpipe.engine.hooks import has_hooks, without_hooks
from torchgpipe.engine.phony import get_phony

__all__ = ["ParameterGradients"]


class ParameterGradients:
    """The gradients of the parameters of one place in the model during a call of the pipeline.

    Args:
        parameters: the tensors that gradients are wanted of; each requires grad
        frozen: the other parameters
        device: where they are
        replicated: whether DistributedDataParallel is around the call, whose hooks cannot be seen

    Attributes:
        phony: an input of every cell that is differentiated here
    """

    __slots__ = ("_ends", "_frozen", "_leaf", "_parameters", "_passes", "_replicated", "phony")

    def __init__(
        self, parameters: Sequence[Tensor], frozen: Sequence[Tensor], device: torch.device, *, replicated: bool
    ) -> None:
        self._parameters = parameters
        self._frozen = frozen
        self._replicated = replicated
        self._passes: WeakValueDictionary[int, Sums] = WeakValueDictionary()
        leaf = get_phony(device).requires_grad_()
        self.phony: Tensor = Deliver.apply(self._passes, leaf, *parameters)
        node: Any = self.phony.grad_fn
        # Where the gradients of the leaf and of the parameters go.
        self._leaf, *self._ends = [end for end, _ in node.next_functions[-len(parameters) - 1 :]]

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
            RuntimeError: the cell uses a tensor that is neither among the leaves nor among the parameters. If the pass
                adds to ``.grad``, the tensor gets its gradient, but what was computed from it outside is used up once.
        """
        sums = self._sums(roots, leaves)
        if sums.are_in_grad:
            try:
                with without_hooks(leaves):  # The layers have put them on the cell's own inputs, too.
                    accumulate(roots, grads, keep_graph)
            except RuntimeError:
                # What was computed from a captured tensor is freed with the first cell that uses it.
                self._refuse_captured(roots, leaves)
                raise
            return [leaf.grad for leaf in leaves]
        self._refuse_captured(roots, leaves)
        wanted = [k for k, parameter in enumerate(self._parameters) if parameter.requires_grad] if sums else []
        inputs = [*leaves, *[self._parameters[k] for k in wanted]]
        if not inputs:
            return []
        with without_hooks(inputs):
            result = gradients(roots, grads, inputs, keep_graph)
        for k, grad in zip(wanted, result[len(leaves) :]):
            sums[k] = _sum(sums[k], grad)
        return result[: len(leaves)]

    def _sums(self, roots: Sequence[Edge], leaves: Sequence[Tensor]) -> Sums:
        """Return the sums of this pass, for which the first cell decides what becomes of gradients.

        Args:
            roots: where the graph of the cell is entered
            leaves: the inputs of the cell that require grad

        Raises:
            RuntimeError: a captured tensor has a hook, which would be called with the gradient of each micro-batch.
        """
        sums = self._passes.get(current_pass())
        if sums is None:
            # A pass that names its inputs does not ask for the leaf.
            takes_all = will_run(self._leaf)
            sums = Sums([None] * len(self._parameters) if takes_all or will_run(self.phony.grad_fn) else [])
            sums.are_in_grad = takes_all and not self._has_listeners()
            if sums.are_in_grad:
                for tensor, node in _leaves(roots, [*leaves, *self._parameters, *self._frozen]):
                    if has_hooks(tensor, node):
                        raise _captured(tensor)
            self._passes[current_pass()] = sums
            at_end_of_pass(sums.clear)  # The pass alone keeps them, so they go with a pass that fails, too.
        return sums

    def _has_listeners(self) -> bool:
        """Whether anything must see gradients whole, or cells would add to the ``.grad`` of what must get none.

        That is a parameter which was frozen at the call only, or which is no leaf.
        """
        return (
            self._replicated
            or any([one.requires_grad for one in self._frozen])
            or any([not one.is_leaf or has_hooks(one, end) for one, end in zip(self._parameters, self._ends)])
        )

    def _refuse_captured(self, roots: Sequence[Edge], leaves: Sequence[Tensor]) -> None:
        """Raise if the graph of a cell ends in a leaf that is neither one of its inputs nor a parameter."""
        for tensor, _ in _leaves(roots, [*leaves, *self._parameters, *self._frozen]):
            raise _captured(tensor)


class Sums(list[Leaf]):
    """The sums of a pass, one for each parameter; empty if the pass asks for no gradient of a parameter.

    Attributes:
        are_in_grad: whether each cell adds to ``.grad`` instead
    """

    are_in_grad = False


class Deliver(Function):
    """Forward: a phony for all cells that are differentiated here. Backward: the sums, if the pass has any."""

    @staticmethod
    def forward(ctx: Any, passes: WeakValueDictionary[int, Sums], leaf: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.passes = passes
        return get_phony(leaf.device)

    @staticmethod
    def backward(ctx: Any, _phony: Tensor | None) -> tuple[Tensor | None, ...]:
        sums = ctx.passes.get(current_pass())
        return None, None, *(sums or [None] * (len(ctx.needs_input_grad) - 2))


def _sum(total: Leaf, grad: Leaf) -> Leaf:
    if total is None or grad is None:
        return grad if total is None else total
    # Sparse + dense is not defined, dense + sparse is.
    return total + grad if total.layout is torch.strided else grad + total


def _leaves(roots: Iterable[Edge], known: Iterable[Tensor]) -> Iterator[tuple[Tensor, Any]]:
    """Yield the leaves that a graph ends in, with their nodes, but for phonies and those that are known."""
    known_ids = set(map(id, known))
    pending: list[Any] = [root.node for root in roots]
    seen = {None, *pending}
    for node in pending:  # It grows meanwhile.
        if type(node).__name__ == "AccumulateGrad" and node.variable.numel() and id(node.variable) not in known_ids:
            yield node.variable, node
        following = [end for end, _ in node.next_functions if end not in seen]
        seen.update(following)
        pending += following


def _captured(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a layer uses a tensor of shape {tuple(tensor.shape)}, or one computed from it, that requires grad but is "
        "neither an input nor a parameter of the layers of its partition, so its gradient would be lost, or a hook of "
        "it would hear parts; register it as a parameter of the layer, pass it as an input, or use checkpoint='never'"
    )
