"""Summing the gradients of a partition's large parameters over its micro-batches, one gradient at a time.

    forward   parameters ──► Accumulate ──phony──► Checkpoint(0, j), Checkpoint(1, j), ...
    backward  each Checkpoint adds to the sums, from within the graph that it differentiates;
              when the last of them is through, the engine comes to Accumulate, which hands over the sums.

A checkpointed cell that returned the gradients of its parameters would have all of them alive at once, beside the
sum of those before. Here a gradient joins the sum as soon as its node has computed it, and is gone before the next.
That takes a hook in Python, for which a small gradient is too quick. Those do go through `Checkpoint`, and the engine
sums them. Of the large ones, those that are little beside the cell's activations join the sums when the cell has been
differentiated, without a hook.

The sums are beside ``.grad``, and a parameter gets its whole gradient once, from the engine. So whatever listens or
selects there (hooks, DistributedDataParallel, `torch.autograd.grad`, `backward(inputs=)`) sees what it sees on the
plain model. But a sum beside the ``.grad`` of an earlier pass takes the memory of both. Where the engine is going to
add to that one, and no hook of the parameter wants to see the gradient first, each gradient is added to ``.grad`` at
once, and the engine gets zeros to add: for what it does afterwards, and for the streams that it makes wait.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torchgpipe.backward_pass import at_end_of_pass, current_pass, will_accumulate, will_run
from torchgpipe.function import Function
from torchgpipe.phony import get_phony
from torchgpipe.typing import Leaf, Leaves

__all__ = ["Accumulation", "Edge", "Source", "Sums", "explore"]

#: Where a gradient goes: a node of autograd, and which of its outputs the gradient is of.
Edge = tuple[Any, int]
#: What computes a gradient of a large parameter: a node, which of its gradients, which parameter.
Source = tuple[Any, int, int]

#: From here on, in bytes, a parameter is large: the memory of its gradient is worth a hook, if it shows at all.
LARGE = 2**14


class Accumulation:
    """How the gradients of the parameters of one place in the model are summed during a call of the pipeline.

    Args:
        parameters: the tensors that the gradients are of; each requires grad
        device: where they are
        inputs: those of a micro-batch
    """

    __slots__ = ("_activations", "_passes", "edges", "large", "phony", "small")

    #: An input of all that adds to the sums, if there is any to add.
    phony: Tensor | None
    #: The parameters whose gradients are left to the engine.
    small: tuple[Tensor, ...]
    #: The others, by their numbers.
    large: dict[int, Tensor]
    #: Where the gradient of each parameter goes: if it is large, its number.
    edges: dict[Edge, int | None]

    def __init__(self, parameters: Sequence[Tensor], device: torch.device, inputs: Leaves) -> None:
        self._activations = _bytes(inputs)
        self._passes: WeakValueDictionary[int, Sums] = WeakValueDictionary()
        phony: Tensor = Accumulate.apply(self._passes, device, *parameters)
        self.large = {k: one for k, one in enumerate(parameters) if _bytes((one,)) >= LARGE}
        self.small = tuple([one for k, one in enumerate(parameters) if k not in self.large])
        self.phony = phony if self.large else None
        node: Any = phony.grad_fn
        edges = node.next_functions[-len(parameters) :]
        self.edges = {edge: k if k in self.large else None for k, edge in enumerate(edges)}

    def sums(self, grads: Leaves) -> Sums | None:
        """Those of the backward pass that this thread is in; None if that has no use for them, or no more.

        Args:
            grads: of the outputs of a micro-batch, where those were not told at forward
        """
        if self.phony is None:
            return None
        this_pass = current_pass()
        sums = self._passes.get(this_pass)
        if sums is None:
            if not will_run(self.phony.grad_fn):
                return None
            large = self.large
            present = {k: node for (node, _), k in self.edges.items() if k in large and _adds_to_grad(large[k], node)}
            beside = self._activations + _bytes(grads)
            heavy = {k for k, parameter in large.items() if _bytes((parameter,)) >= beside}
            sums = self._passes[this_pass] = Sums(len(self.edges), present, heavy)
            # Nothing but the pass itself keeps them, so that they end with it also if it fails.
            at_end_of_pass(sums.end)
        return None if sums.delivered else sums

    def take_from(self, outputs: Leaves, before: Iterable[Any]) -> None:
        """Lets the graph of ``outputs`` add to the sums at backward, as far as the nodes ``before``."""
        if not self.large:
            return
        self._activations += _bytes(outputs)
        sources, _ = explore(outputs, self.edges, before)
        for node, slot, k in sources:
            node.register_hook(partial(_take_if_wanted, self, slot, k))


class Sums:
    """The gradients of some parameters, summed as far as a backward pass has come.

    Args:
        count: how many parameters
        present: the nodes that add to ``.grad``, of the parameters whose sum is there
        heavy: the parameters whose gradients take at least as much memory as a micro-batch at the ends of its cell
    """

    __slots__ = ("__weakref__", "_added", "_at_once", "_owned", "_present", "_sums", "delivered")

    def __init__(self, count: int, present: dict[int, Any], heavy: set[int]) -> None:
        # The gradients of the others come while more than that goes: they can wait for the end of the graph, unless
        # they are to join what is there. And so can one alone.
        self._at_once = {*present, *(heavy if len(heavy) > 1 else ())}
        self._sums: list[Any] = [None] * count
        self._owned = [False] * count
        self._present = present
        self._added: set[int] = set()
        self.delivered = False

    def add(self, k: int, grad: Tensor) -> None:
        """Adds to the gradient of parameter ``k``."""
        sums = self._sums
        if k in self._present:
            self._present[k](grad)  # It lets one thread at a time add.
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

    def take_from(self, sources: Iterable[Source]) -> None:
        """Lets nodes add to the sums when they run, as far as that saves memory."""
        for node, slot, k in sources:
            if k in self._at_once:
                node.register_hook(partial(_take, self, slot, k))

    def deliver(self) -> list[Tensor | None]:
        """The sums, zeros where they are in ``.grad`` already. From now on, nothing can be added."""
        sums, self._sums = self._sums, []
        for k in self._added:
            sums[k] = _zeros(self._present[k].variable)
        self.delivered = True
        return sums

    def end(self) -> None:
        """The backward pass is over."""
        self._sums = []
        self.delivered = True


def explore(
    outputs: Leaves, parameters: dict[Edge, int | None], before: Iterable[Any] = ()
) -> tuple[list[Source], list[Any]]:
    """Follows the graph of ``outputs`` down to the parameters and as far as the nodes ``before``.

    Returns:
        what computes the gradients of the large parameters, and the nodes of leaves that are no parameters
    """
    sources: list[Source] = []
    ends: list[Any] = []
    before = {None, *before}
    pending: list[Any] = list({output.grad_fn for output in outputs if output is not None} - before)
    seen = {*before, *pending}
    while pending:
        node = pending.pop()
        edges = node.next_functions
        if not edges:
            ends.append(node)
        for slot, edge in enumerate(edges):
            if edge in parameters:
                k = parameters[edge]
                if k is not None:
                    sources.append((node, slot, k))
            elif edge[0] not in seen:
                seen.add(edge[0])
                pending.append(edge[0])
    return sources, ends


def _take(sums: Sums, slot: int, k: int, grads: Leaves, _: Leaves) -> Leaves | None:
    """The hook of a node: takes one of the gradients that it has computed."""
    grad = grads[slot]
    if grad is None:
        return None
    sums.add(k, grad)
    return (*grads[:slot], None, *grads[slot + 1 :])


def _take_if_wanted(accumulation: Accumulation, slot: int, k: int, grads: Leaves, _: Leaves) -> Leaves | None:
    sums = accumulation.sums(())
    return None if sums is None else _take(sums, slot, k, grads, _)


def _bytes(tensors: Leaves) -> int:
    return sum([one.numel() * one.element_size() for one in tensors if one is not None])


def _adds_to_grad(parameter: Tensor, node: Any) -> bool:
    """Whether the pass adds to a gradient that is there, with no hook that is to see first what is added."""
    if not parameter.is_leaf or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
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
    """Forward: a phony for all that adds to the sums. Backward: the sums."""

    @staticmethod
    def forward(ctx: Any, passes: WeakValueDictionary[int, Sums], device: torch.device, *parameters: Leaf) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.passes = passes
        return get_phony(device)

    @staticmethod
    def backward(ctx: Any, _phony: Tensor | None) -> tuple[Tensor | None, ...]:
        sums = ctx.passes.get(current_pass())
        return None, None, *([None] * (len(ctx.needs_input_grad) - 2) if sums is None else sums.deliver())
