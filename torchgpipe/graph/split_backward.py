"""The backward of a cell in two halves: first the gradient of its input, later the gradients of its weights.

The first half differentiates the graph with respect to the input only. It passes nodes at which the gradients of
weights branch off, such as that of a matrix product, and notes the gradients that arrive there. The second half enters
the graph at each of these nodes by itself, and goes on to the weights only:

    output ──► node ──► node ──► node ──► input          first half, along the line
                 └► weight         └► weight             second half, one node at a time

Entering at several nodes at once would count gradients twice, because one leads to the next. So a weight that two nodes
lead to gets its gradient in the first half. A function of Python cannot be differentiated in this way, as its backward
would run twice. Then the first half does all the work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from torchgpipe.graph.function import Edge, accumulate

__all__ = ["SplitBackward", "nodes_below"]


class SplitBackward:
    """The two halves of the backward of a graph.

    Args:
        roots: where the graph is entered
        leaf: the leaf in place of the inputs
    """

    def __init__(self, roots: Sequence[Edge], leaf: Tensor) -> None:
        self._roots = roots
        self._leaf = leaf
        order = nodes_below(roots)
        #: Whether there is a gradient of the inputs.
        self.reaches_inputs = any([getattr(node, "variable", None) is leaf for node in order])
        #: For each node where weights branch off, the leaves that it alone leads to; None if there is one half.
        self._branches = _branches(order, roots, leaf)
        #: The leaves that several of these nodes lead to.
        self._shared: list[Tensor] = []
        if self._branches:
            self._branches, self._shared = _apart(self._branches)
        self._arrived: dict[Any, tuple[Tensor | None, ...]] = {}

    @property
    def is_possible(self) -> bool:
        """Whether the graph can be differentiated in two halves."""
        return self._branches is not None

    def differentiate_inputs(self, grads: Sequence[Tensor]) -> None:
        """Let the gradients of the inputs and of shared weights arrive, and note the gradients at the branches."""
        assert self._branches is not None
        handles = []
        for node in self._branches:

            def note(arrived: tuple[Tensor | None, ...], node: Any = node) -> None:
                self._arrived[node] = arrived

            handles.append(node.register_prehook(note))
        try:
            accumulate(self._roots, grads, True, [self._leaf, *self._shared])
        finally:
            for handle in handles:
                handle.remove()

    def differentiate_weights(self) -> None:
        """Add the gradients of the weights to ``.grad``, and drop the graph."""
        branches, self._branches, self._roots = self._branches or {}, None, ()
        for node, weights in branches.items():
            arrived = self._arrived.pop(node, ())
            entered = [(GradientEdge(node, k), grad) for k, grad in enumerate(arrived) if grad is not None]
            if not entered:
                continue
            edges, grads = zip(*entered)
            # Hooks of the layers have changed these gradients before they were noted, and would change them again.
            handle = node.register_prehook(lambda _, arrived=arrived: arrived)
            try:
                accumulate(edges, grads, keep_graph=False, leaves=weights)
            finally:
                handle.remove()


def _branches(order: Sequence[Any], roots: Sequence[Edge], leaf: Tensor) -> dict[Any, list[Tensor]] | None:
    """Return the nodes on the way to ``leaf`` at which weights branch off, with the weights.

    None, if the graph has a function of Python, a root that does not lead to ``leaf``, or a group norm.
    """
    leads: dict[Any, bool] = {}
    for node in reversed(order):
        if isinstance(node, BackwardCFunction) and type(node).__name__ != "EnterBackward":
            return None
        leads[node] = getattr(node, "variable", None) is leaf or any(
            leads[following] for following, _ in node.next_functions if following is not None
        )
    if not all(leads[root.node] for root in roots):
        return None
    branches: dict[Any, list[Tensor]] = {}
    for node in order:
        sides = [end for end, _ in node.next_functions if end is not None and leads[node] and not leads[end]]
        # Without the gradient of its input, a group norm kills the process if memory is in the order of channels.
        if sides and type(node).__name__ == "NativeGroupNormBackward0":
            return None
        below = nodes_below([GradientEdge(side, 0) for side in sides])
        if weights := [one.variable for one in below if hasattr(one, "variable")]:
            branches[node] = weights
    return branches


def _apart(branches: dict[Any, list[Tensor]]) -> tuple[dict[Any, list[Tensor]] | None, list[Tensor]]:
    """Return the branches with the weights that each alone leads to, None if there are none, and all other weights."""
    every = [weight for weights in branches.values() for weight in weights]
    counts = Counter(map(id, every))
    own = {node: [one for one in weights if counts[id(one)] == 1] for node, weights in branches.items()}
    own = {node: weights for node, weights in own.items() if weights}
    return own or None, [*{id(one): one for one in every if counts[id(one)] > 1}.values()]


def nodes_below(roots: Sequence[Edge]) -> list[Any]:
    """Return all nodes of a graph, each before the nodes that it leads to."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(root.node, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(end, False) for end, _ in node.next_functions if end is not None and end not in seen]
    return order[::-1]
