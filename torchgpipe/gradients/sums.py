"""The gradients of one cell: added to ``.grad``, or to sums beside it; and tensors that a layer has captured.

A captured tensor is a leaf that is neither an input of the cell nor a parameter of its layers. It gets its gradient
where cells add to ``.grad``; where sums are kept, nothing could take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.typing import Leaf
from torchgpipe.graph.function import Edge, accumulate, gradients
from torchgpipe.graph.hooks import without_hooks

__all__ = ["add_to_grad", "captured_by", "differentiate_into", "refusal", "sum_of"]


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
    except RuntimeError:
        # The first cell that uses a captured non-leaf frees what that was computed from.
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
    with without_hooks(inputs[len(leaves) :]):
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


def _refuse_captured(roots: Sequence[Edge], known: Sequence[Tensor]) -> None:
    """Raise if the graph of a cell ends in a leaf that is not known.

    Raises:
        RuntimeError: the gradient of that leaf would be lost, or arrive in parts where a hook listens.
    """
    for tensor in captured_by(roots, known):
        raise refusal(tensor)


def captured_by(roots: Sequence[Edge], known: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that a graph ends in, but for phonies and what is known."""
    known_ids = set(map(id, known))
    for node in _nodes(roots):
        if type(node).__name__ == "AccumulateGrad" and node.variable.numel() and id(node.variable) not in known_ids:
            yield node.variable


def _nodes(roots: Iterable[Edge]) -> Iterator[Any]:
    """Yield all nodes of a graph."""
    pending: list[Any] = list({root.node: None for root in roots})
    seen = {None, *pending}
    for node in pending:  # The list grows meanwhile.
        yield node
        following = [end for end, _ in node.next_functions if end not in seen]
        seen.update(following)
        pending += following


def refusal(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a layer uses a tensor of shape {tuple(tensor.shape)}, or one computed from it, that requires grad but is "
        "neither an input nor a parameter of the layers of its partition, so its gradient would be lost, or a hook of "
        "it would hear parts; register it as a parameter of the layer, pass it as an input, or use checkpoint='never'"
    )
