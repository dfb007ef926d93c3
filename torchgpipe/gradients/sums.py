"""The gradients of one cell: added to ``.grad``, or to sums beside it; and tensors that a layer has captured.

A captured tensor is a leaf that is neither an input of the cell nor a parameter of its layers. It gets its gradient
where cells add to ``.grad``; where sums are kept, nothing could take it.

The graph of a cell ends in the parameters, so PyTorch calls the hooks of a parameter there, with the gradient of one
micro-batch. Where sums are kept, they are not to hear it: they hear the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import gradient_hooks
from torchgpipe.devices.typing import Leaf
from torchgpipe.graph.function import Edge, accumulate, gradients
from torchgpipe.graph.split_backward import nodes_below

__all__ = ["add_to_grad", "captured_by", "differentiate_into", "refusal", "sum_of"]

#: Whether this thread differentiates the graph of a cell.
_in_a_cell: ContextVar[bool] = ContextVar("torchgpipe_in_a_cell", default=False)


def add_to_grad(
    owned: Sequence[Tensor],
    roots: Sequence[Edge],
    grads: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    keep_graph: bool,
) -> list[Leaf]:
    """Differentiate the graph of a cell, and add the gradients of parameters, and of what was captured, to ``.grad``.

    Args, returns and raises as `differentiate_into`.
    """
    try:
        accumulate(roots, grads, keep_graph)
    except RuntimeError as error:
        # The first cell that uses a captured non-leaf frees what that was computed from.
        if "backward through the graph a second time" in str(error):
            _refuse_captured(roots, [*leaves, *owned])
        raise
    return [leaf.grad for leaf in leaves]


def differentiate_into(
    sums: list[Leaf],
    owned: Sequence[Tensor],
    roots: Sequence[Edge],
    grads: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    keep_graph: bool,
) -> list[Leaf]:
    """Differentiate the graph of a cell, and add the gradients of parameters to ``sums``.

    Args:
        sums: the sums of the gradients, one for each of the first parameters in ``owned``
        owned: the parameters of the partition, those that require grad first
        roots: where the graph is entered
        grads: a gradient for each root
        leaves: the inputs of the cell that require grad
        keep_graph: whether the graph will be differentiated again

    Returns:
        the gradients of the leaves; None for one that was not used

    Raises:
        RuntimeError: the cell uses a tensor that is neither among the leaves nor owned, and the gradient of that tensor
            would be lost, or another cell has used up what it was computed from.
    """
    _refuse_captured(roots, [*leaves, *owned])
    wanted = [k for k in range(len(sums)) if owned[k].requires_grad]
    inputs = [*leaves, *[owned[k] for k in wanted]]
    if not inputs:
        return []
    with _without_hooks(inputs[len(leaves) :]):
        result = gradients(roots, grads, inputs, keep_graph)
    for k, grad in zip(wanted, result[len(leaves) :]):
        sums[k] = sum_of(sums[k], grad)
    return result[: len(leaves)]


def sum_of(total: Leaf, grad: Leaf) -> Leaf:
    """Return a sum of gradients, either of which may be None or sparse."""
    if total is None or grad is None:
        return grad if total is None else total
    # Sparse + dense is not defined, dense + sparse is.
    return grad + total if grad.layout is torch.strided else total + grad


class _Whole:
    """A hook that hears whole gradients only. It takes the place of the hook in the dict of the tensor."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, grad: Leaf) -> Any:
        return None if _in_a_cell.get() else self._hook(grad)


@contextmanager
def _without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep the hooks of ``tensors`` from hearing what this thread differentiates in a ``with`` block."""
    for tensor in tensors:
        hooks = gradient_hooks(tensor)
        hooks.update({key: _Whole(hook) for key, hook in hooks.items() if not isinstance(hook, _Whole)})
    token = _in_a_cell.set(True)
    try:
        yield
    finally:
        _in_a_cell.reset(token)


def captured_by(roots: Sequence[Edge], known: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that a graph ends in, but for phonies and what is known."""
    known_ids = set(map(id, known))
    for node in nodes_below(roots):
        if type(node).__name__ == "AccumulateGrad" and node.variable.numel() and id(node.variable) not in known_ids:
            yield node.variable


def _refuse_captured(roots: Sequence[Edge], known: Sequence[Tensor]) -> None:
    """Raise if the graph of a cell ends in a leaf that is not known, whose gradient would be lost."""
    for tensor in captured_by(roots, known):
        raise refusal(tensor)


def refusal(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a layer uses a tensor of shape {tuple(tensor.shape)}, or one computed from it, that requires grad but is "
        "neither an input nor a parameter of the layers of its partition, so its gradient would be lost, or a hook of "
        "it would hear parts; register it as a parameter of the layer, pass it as an input, or use checkpoint='never'"
    )
