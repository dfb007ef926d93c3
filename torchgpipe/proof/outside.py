"""Leaves outside of a model that its graph ends in: an adapter that replaces a forward, a trained prompt in a closure.

The parameters of a model have stand-ins during a proof; such leaves have none. So their gradients and hooks are set
aside when a graph first leads to them, and put back at the end of the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.torch_internals import gradient_hooks, hooks_behind_accumulation
from torchgpipe.devices.typing import Leaf
from torchgpipe.engine.split_backward import nodes_below

__all__ = ["Outside"]


class Outside:
    """The leaves outside of a model, for a ``with`` block.

    Attributes:
        leaves: those that a graph has led to
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self._put_back: list[Callable[[], object]] = []

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *_: object) -> None:
        for put_back in self._put_back:
            put_back()

    def note(self, roots: Sequence[Tensor], own: Collection[Tensor]) -> None:
        """Set aside what is at the leaves of a graph, before it is differentiated.

        Args:
            roots: where the graph is entered
            own: the leaves that belong to the run
        """
        known = {id(leaf) for leaf in (*own, *self.leaves)}
        for node in nodes_below([get_gradient_edge(root) for root in roots]):
            leaf: Tensor | None = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                known.add(id(leaf))
                self.leaves.append(leaf)
                self._put_back.append(_set_aside(leaf))

    def take(self) -> list[Leaf]:
        """Return the gradients that have arrived, and leave none."""
        grads = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return grads


def _set_aside(leaf: Tensor) -> Callable[[], object]:
    """Take the gradient and the hooks of a leaf, and return what puts them back."""
    grad = leaf.grad
    hooks: list[dict[int, Any]] = [gradient_hooks(leaf), hooks_behind_accumulation(leaf)]
    before = [dict(by_id) for by_id in hooks]

    def put_back() -> None:
        leaf.grad = grad
        for by_id, known in zip(hooks, before):
            by_id.update(known)

    leaf.grad = None
    for by_id in hooks:
        by_id.clear()
    return put_back
