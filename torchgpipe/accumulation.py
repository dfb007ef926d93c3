"""Summing the gradients of a partition's large parameters over its micro-batches, one gradient at a time.

    forward   parameters ──► Accumulate ──phony──► Checkpoint(0, j), Checkpoint(1, j), ...
    backward  each Checkpoint adds to the sums, from within the graph that it differentiates;
              when the last of them is through, the engine comes to Accumulate, which hands over the sums.

A checkpointed cell that returned the gradients of its parameters would have all of them alive at once, beside the
sum of those before. Here a gradient joins the sum as soon as it is computed, and is gone before the next: a hook of
the parameter, there only while the cell is differentiated, takes it from the engine. That takes Python, for which a
small gradient is too quick. Those do go through `Checkpoint`, and the engine sums them. Of the large ones, those that
are little beside the cell's activations are added when the cell is differentiated, without a hook.

The sums are beside ``.grad``, and a parameter gets its whole gradient once, from the engine. So whatever listens or
selects there (hooks, DistributedDataParallel, `torch.autograd.grad`, `backward(inputs=)`) sees what it sees on the
plain model. But a sum beside the ``.grad`` of an earlier pass takes the memory of both. Where the engine is going to
add to that one, and no hook of the parameter wants to see the gradient first, each gradient is added to ``.grad`` at
once, and the engine gets zeros to add: for what it does afterwards, and for the streams that it makes wait.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchgpipe.backward_pass import at_end_of_pass, current_pass, will_accumulate, will_run
from torchgpipe.function import Function
from torchgpipe.phony import get_phony
from torchgpipe.typing import Leaf, Leaves

__all__ = ["Accumulation", "Edge", "Sums"]

#: Where a gradient goes: a node of autograd, and which of its outputs the gradient is of.
Edge = tuple[Any, int]

#: From here on, in bytes, a parameter is large: the memory of its gradient is worth a hook.
LARGE = 2**14

#: From the tensors whose gradients are wanted to the gradients.
Differentiate = Callable[[list[Any]], Sequence[Tensor | None]]

#: The hooks of a parameter, by their keys, and one to be put among them.
Taker = tuple[dict[int, Any], Callable[[Tensor], Tensor | None]]

#: The key of that one. PyTorch counts its own from zero on.
_TAKER = -1


class Accumulation:
    """How the gradients of the parameters of one place in the model are summed during a call of the pipeline.

    Args:
        parameters: the tensors that the gradients are of; each requires grad
        device: where they are
        inputs: those of a micro-batch
    """

    __slots__ = ("_input_bytes", "_passes", "_takers", "edges", "large", "nodes", "phony", "small")

    #: An input of all that adds to the sums, if there is any to add.
    phony: Tensor | None
    #: The parameters whose gradients are left to the engine.
    small: tuple[Tensor, ...]
    #: The others, each a leaf.
    large: tuple[Tensor, ...]
    #: Where the gradients of leaves go: the nodes of all parameters that are.
    nodes: list[Any]
    #: The other parameters can be among several outputs of a node.
    edges: list[Edge]

    def __init__(self, parameters: Sequence[Tensor], device: torch.device, inputs: Leaves) -> None:
        self._input_bytes = _bytes(inputs)
        self.large = tuple([parameter for parameter in parameters if _is_large(parameter)])
        self.small = tuple([parameter for parameter in parameters if not _is_large(parameter)])
        self._passes: WeakValueDictionary[int, Sums] = WeakValueDictionary()
        phony: Tensor = Accumulate.apply(self._passes, device, *self.large, *self.small)
        self.phony = phony if self.large else None
        self._takers = [(_hooks_of(one), partial(_take, self.large, k)) for k, one in enumerate(self.large)]
        node: Any = phony.grad_fn
        edges: Sequence[Edge] = node.next_functions[-len(parameters) :]
        self.nodes = [edge[0] for edge, parameter in zip(edges, self.large + self.small) if parameter.is_leaf]
        self.edges = [edge for edge, parameter in zip(edges, self.large + self.small) if not parameter.is_leaf]

    def sums(self, grads: Leaves) -> Sums | None:
        """Those of the backward pass that this thread is in; None if that has no use for them.

        Args:
            grads: of the outputs of a micro-batch
        """
        if self.phony is None:
            return None
        this_pass = current_pass()
        sums = self._passes.get(this_pass)
        if sums is None:
            if not will_run(self.phony.grad_fn):
                return None
            beside = self._input_bytes + _bytes(grads)
            sums = self._passes[this_pass] = Sums(self.large, self._takers, self.nodes, beside)
            # Nothing but the pass itself keeps them, so that they end with it also if it fails.
            at_end_of_pass(sums.end)
        return sums


class Sums:
    """The gradients of some parameters, summed as far as a backward pass has come.

    Args:
        parameters: the parameters, each a leaf
        takers: the hooks of each, and the one that takes its gradient, which is among them only while a graph is
            differentiated
        nodes: what adds to the ``.grad`` of each
        beside: the bytes of the activations at both ends of a micro-batch
    """

    __slots__ = ("__weakref__", "_added", "_nodes", "_owned", "_parameters", "_present", "_sums", "_takers")

    def __init__(
        self, parameters: tuple[Tensor, ...], takers: Sequence[Taker], nodes: Sequence[Any], beside: int
    ) -> None:
        self._parameters = parameters
        self._nodes = nodes
        self._present = [_adds_to_grad(parameter, node) for parameter, node in zip(parameters, nodes)]
        # What is less than the activations, which go while it comes, can wait for the end of the graph, and so can one
        # alone. But not beside a gradient that is there.
        heavy = [_bytes((parameter,)) >= beside for parameter in parameters]
        hooked = [present or (one and sum(heavy) > 1) for one, present in zip(heavy, self._present)]
        self._takers = [taker for taker, is_hooked in zip(takers, hooked) if is_hooked]
        self._sums: list[Any] = [None] * len(parameters)
        self._owned = [False] * len(parameters)
        self._added: set[int] = set()

    def add_all(self, differentiate: Differentiate, wanted: list[Any]) -> Sequence[Tensor | None]:
        """Adds the gradients of the parameters in a graph, and returns those of ``wanted``.

        Args:
            differentiate: from the tensors whose gradients are wanted to these
            wanted: tensors beside the parameters
        """
        # One that was frozen since the call gets no gradient from the plain model either.
        trained = [k for k, parameter in enumerate(self._parameters) if parameter.requires_grad]
        outer, _thread.sums = _thread.sums, self
        for hooks, taker in self._takers:
            hooks[_TAKER] = taker
        try:
            grads = differentiate(wanted + [self._parameters[k] for k in trained])
        finally:
            for hooks, _ in self._takers:
                hooks.pop(_TAKER, None)  # Another thread may have done so.
            _thread.sums = outer
        for k, grad in zip(trained, grads[len(wanted) :]):
            if grad is not None and grad is not self._parameters[k]:  # The engine had no hook to call.
                self.add(k, grad)
        return grads[: len(wanted)]

    def add(self, k: int, grad: Tensor) -> None:
        """Adds to the gradient of parameter ``k``."""
        sums = self._sums
        if self._present[k]:
            self._nodes[k](grad)  # It lets one thread at a time add.
            self._added.add(k)
        elif self._owned[k]:
            sums[k].add_(grad)
        elif sums[k] is None:
            # Not ours yet: autograd hands the same tensor to all that have the same gradient.
            sums[k] = grad
        elif sums[k].layout is not torch.strided:
            sums[k] = grad + sums[k]  # In this order, because sparse + dense is not defined.
        else:
            self._owned[k] = True
            # The gradient of a transposed weight is a view, and keeps its base, which would count as another holder.
            sums[k] = sums[k].detach()
            if _is_alone(sums, k):
                sums[k].add_(grad)
            else:
                sums[k] = sums[k] + grad

    def deliver(self) -> list[Tensor | None]:
        """The sums, zeros where they are in ``.grad`` already."""
        sums, self._sums = self._sums, []
        for k in self._added:
            sums[k] = _zeros(self._parameters[k])
        return sums

    def end(self) -> None:
        """The backward pass is over."""
        self._sums = []


class _Thread(threading.local):
    sums: Sums | None = None


#: Whose graph each thread differentiates.
_thread = _Thread()


def _take(parameters: tuple[Tensor, ...], k: int, grad: Tensor) -> Tensor | None:
    """The hook of a large parameter: adds its gradient, and leaves the engine another tensor in its place."""
    sums = _thread.sums
    # Another thread may differentiate another graph of the same parameter.
    if sums is None or sums._parameters is not parameters or grad.layout is not torch.strided:
        return None
    sums.add(k, grad)
    return parameters[k]  # Nobody looks at its numbers. It is of the right shape, and takes no memory.


def _bytes(tensors: Leaves) -> int:
    return sum([one.numel() * one.element_size() for one in tensors if one is not None])


def _hooks_of(parameter: Tensor) -> dict[int, Any]:
    if parameter._backward_hooks is None:
        # Once, and not for each graph: another thread may be looking for hooks just then.
        parameter._backward_hooks = OrderedDict()
    hooks: dict[int, Any] = parameter._backward_hooks
    return hooks


def _is_large(parameter: Tensor) -> bool:
    return parameter.is_leaf and _bytes((parameter,)) >= LARGE


def _adds_to_grad(parameter: Tensor, node: Any) -> bool:
    """Whether the pass adds to a gradient that is there, with no hook that is to see first what is added."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided or grad.dtype != parameter.dtype:
        return False
    if grad.element_size() < 4:  # In half precision, many small additions to a large number lose too much.
        return False
    return will_accumulate(node)


def _zeros(like: Tensor) -> Tensor:
    """Nothing to add, in the memory of one number. Of zeros, only negative ones change no number's sign."""
    return like.new_zeros(()).neg().expand_as(like)


def _holders(tensors: list[Any], k: int) -> tuple[int, int, int]:
    """How many hold a tensor in Python, how many in C++, and how many its memory."""
    tensor_count, memory_count = tensors[k]._use_count(), _memory_use_count(tensors[k].untyped_storage()._cdata)
    return sys.getrefcount(tensors[k]), tensor_count, memory_count


_memory_use_count: Any = torch._C._storage_Use_Count
_LIST_ALONE = _holders([torch.empty(1, device="cpu")], 0)


def _is_alone(tensors: list[Any], k: int) -> bool:
    """Whether nobody but a list sees the memory of its tensor, so that this can be changed in place."""
    is_whole: bool = tensors[k].untyped_storage().nbytes() == tensors[k].nbytes
    return is_whole and _holders(tensors, k) == _LIST_ALONE


class Accumulate(Function):
    """Forward: a phony for all that adds to the sums. Backward: the sums, which are of the first parameters."""

    @staticmethod
    def forward(ctx: Any, passes: WeakValueDictionary[int, Sums], device: torch.device, *parameters: Leaf) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.passes = passes
        return get_phony(device)

    @staticmethod
    def backward(ctx: Any, _phony: Tensor | None) -> tuple[Tensor | None, ...]:
        sums = ctx.passes.get(current_pass())
        delivered = [] if sums is None else sums.deliver()
        return None, None, *delivered, *[None] * (len(ctx.needs_input_grad) - 2 - len(delivered))
