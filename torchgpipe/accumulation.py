"""Summing the gradients of a partition's large parameters over its micro-batches, one gradient at a time.

    forward   parameters ──► Accumulate ──phony──► Checkpoint(0, j), Checkpoint(1, j), ...
    backward  each Checkpoint adds to the sums, from within the graph that it differentiates;
              when the last of them is through, the engine comes to Accumulate, which hands over the sums.

A checkpointed cell that returned the gradients of its parameters would have all of them alive at once, beside the
sum of those before. Here a gradient joins the sum as soon as its node has computed it, and is gone before the next.
That takes a hook in Python, for which small gradients are too quick. Those that together take next to no memory do go
through `Checkpoint`, and the engine sums them. Of the others, the large ones, those that are light beside the
activations of their layer come while these go: without a hook, they join the sums when their cell is differentiated.

The sums are beside ``.grad``, and a parameter gets its whole gradient once, from the engine. So whatever listens or
selects there (hooks, DistributedDataParallel, `torch.autograd.grad`, `backward(inputs=)`) sees what it sees on the
plain model. But a sum beside the ``.grad`` of an earlier pass takes the memory of both. Where the engine is going to
add to that one, and no hook of the parameter wants to see the gradient first, each gradient is added to ``.grad`` at
once, and the engine gets zeros to add: for what it does afterwards, and for the streams that it makes wait.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from torchgpipe.backward_pass import at_end_of_pass, current_pass, will_accumulate, will_run
from torchgpipe.function import Function
from torchgpipe.phony import get_phony
from torchgpipe.typing import Leaf, Leaves

__all__ = ["Accumulation", "Edge", "Source", "Sums", "explore"]

#: Where a gradient goes: a node of autograd, and which of its outputs the gradient is of.
Edge = tuple[Any, int]
#: What computes a gradient of a large parameter: a node, which of its gradients, which parameter. And its layer's node:
#: what computes the gradient may only have to transpose or to cast it.
Source = tuple[Any, int, int, Any]

#: The smallest parameters of a place are small as long as they have no more bytes together than this, or no more than
#: this share of all, and so is one with no more than the last number: the memory of its gradient is not worth a hook.
SMALL = 5 * 2**10
SMALL_SHARE = 1 / 1024
TINY = 2**10

#: A gradient of at most this share of what its layer reads or writes can wait until the graph has been differentiated.
LIGHT = 1 / 8


class Accumulation:
    """How the gradients of the parameters of one place in the model are summed during a call of the pipeline.

    Args:
        parameters: the tensors that the gradients are of; each requires grad
        device: where they are
    """

    __slots__ = ("__weakref__", "_hooks", "_passes", "edges", "large", "phony", "small")

    #: An input of all that adds to the sums, if there is any to add.
    phony: Tensor | None
    #: The parameters whose gradients are left to the engine.
    small: tuple[Tensor, ...]
    #: The others, by their numbers.
    large: dict[int, Tensor]
    #: Where the gradient of each parameter goes: if it is large, its number.
    edges: dict[Edge, int | None]

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._hooks: list[Any] = []
        self._passes: WeakValueDictionary[int, Sums] = WeakValueDictionary()
        phony: Tensor = Accumulate.apply(self._passes, device, *parameters)
        self.large = _large(parameters)
        self.small = tuple([one for k, one in enumerate(parameters) if k not in self.large])
        self.phony = phony if self.large else None
        node: Any = phony.grad_fn
        edges = node.next_functions[-len(parameters) :]
        self.edges = {edge: k if k in self.large else None for k, edge in enumerate(edges)}

    def sums(self) -> Sums | None:
        """Those of the backward pass that this thread is in; None if that has no use for them, or no more."""
        if self.phony is None:
            return None
        this_pass = current_pass()
        sums = self._passes.get(this_pass)
        if sums is None:
            if not will_run(self.phony.grad_fn):
                return None
            large = self.large
            present = {k: node for (node, _), k in self.edges.items() if k in large and _adds_to_grad(large[k], node)}
            sums = self._passes[this_pass] = Sums(self, present)
            # Nothing but the pass itself keeps them, so that they end with it also if it fails.
            at_end_of_pass(sums.end)
        return None if sums.delivered else sums

    def heavy(self, sources: Sequence[Source]) -> set[int]:
        """The parameters whose gradients take much memory beside the activations of their layer, or come elsewhere."""
        large, edges = self.large, self.edges
        light = [k for _, _, k, layer in sources if _bytes(large[k]) <= LIGHT * _activations(layer, edges)]
        return large.keys() - set(light)

    def take_from(self, outputs: Leaves, before: Iterable[Any]) -> None:
        """Lets the graph of ``outputs`` add to the sums at backward, as far as the nodes ``before``."""
        if not self.large:
            return
        sources, _ = explore(outputs, self.edges, before)
        # A layer may have kept one of the nodes, which then outlives all this.
        this = ref(self)
        self._hooks += [node.register_hook(partial(_take_if_wanted, this, slot, k)) for node, slot, k, _ in sources]

    def __del__(self) -> None:
        # Values do not need the hooks, so a graph that lives on can do without.
        for hook in self._hooks:
            hook.remove()


class Sums:
    """The gradients of some parameters, summed as far as a backward pass has come.

    Args:
        accumulation: knows the parameters
        present: the nodes that add to ``.grad``, of the parameters whose sum is there
    """

    __slots__ = ("__weakref__", "_accumulation", "_added", "_at_once", "_owned", "_present", "_sums", "delivered")

    def __init__(self, accumulation: Accumulation, present: dict[int, Any]) -> None:
        self._accumulation = accumulation
        self._at_once: set[int] | None = None
        self._sums: list[Any] = [None] * len(accumulation.edges)
        self._owned = [False] * len(accumulation.edges)
        self._present = present
        self._added: set[int] = set()
        self.delivered = False

    def add(self, k: int, grad: Tensor) -> None:
        """Adds to the gradient of parameter ``k``."""
        sums = self._sums
        if self._owned[k]:
            sums[k].add_(grad)
        elif k in self._present:
            self._present[k](grad)  # It lets one thread at a time add.
            self._added.add(k)
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

    def take_from(self, sources: Sequence[Source]) -> list[Any]:
        """Lets nodes add to the sums when they run, as far as that saves memory, which the first cell tells for all.

        Returns:
            hooks, to be removed: a layer may have kept one of the nodes, which then runs in other passes as well
        """
        if self._at_once is None:
            heavy = self._accumulation.heavy(sources)
            # One alone can wait as well, unless it is to join what is there.
            self._at_once = {*self._present, *(heavy if len(heavy) > 1 else ())}
        wanted = self._at_once
        return [node.register_hook(partial(_take, self, slot, k)) for node, slot, k, _ in sources if k in wanted]

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
    # The nodes that were found, and which one with several gradients they were found from.
    seen = dict.fromkeys([*before, *pending])
    for node in pending:  # It grows meanwhile.
        edges = node.next_functions
        if not edges:
            ends.append(node)
        layer = node if len(edges) > 1 else seen[node] or node
        for slot, edge in enumerate(edges):
            following = edge[0]
            if following in seen:
                continue
            if edge not in parameters:
                seen[following] = layer
                pending.append(following)
            elif (k := parameters[edge]) is not None:
                sources.append((node, slot, k, layer))
    return sources, ends


def _take(sums: Sums, slot: int, k: int, grads: Leaves, _: Leaves) -> Leaves | None:
    """The hook of a node: takes one of the gradients that it has computed."""
    grad = grads[slot]
    # PyTorch compares the sizes of all that a hook returns, and those of nested tensors cannot be.
    if grad is None or any([one is not None and one.is_nested for one in grads]):
        return None
    sums.add(k, grad)
    return (*grads[:slot], None, *grads[slot + 1 :])


def _take_if_wanted(reference: ref[Accumulation], slot: int, k: int, grads: Leaves, inputs: Leaves) -> Leaves | None:
    accumulation = reference()
    sums = None if accumulation is None else accumulation.sums()
    return None if sums is None else _take(sums, slot, k, grads, inputs)


def _large(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    sizes = [_bytes(parameter) for parameter in parameters]
    rest = max(SMALL, SMALL_SHARE * sum(sizes))
    large = {}
    for k in sorted(range(len(sizes)), key=sizes.__getitem__):
        rest -= sizes[k]
        if rest < 0 and sizes[k] > TINY:
            large[k] = parameters[k]
    return large


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _activations(layer: Any, edges: dict[Edge, int | None]) -> int:
    """The memory of what a layer reads or writes, whichever is more.

    Args:
        layer: its node
        edges: those of all parameters
    """
    reads = [edge for edge in layer.next_functions if edge[0] is not None and edge not in edges]
    tensors = [*layer._input_metadata, *[following._input_metadata[slot] for following, slot in reads]]
    return max([math.prod(one.shape) * one.dtype.itemsize for one in tensors if not one.is_nested_tensor], default=0)


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
