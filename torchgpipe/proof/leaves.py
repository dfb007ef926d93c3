"""Gradients and hooks of leaves, set aside for a proof: those of a GPipe's parameters, and of what no module has.

The parameters of a pipelined model have aliases during a proof. A graph may end in other leaves, too: an adapter that
replaces a forward, a trained prompt in a closure. These are set aside when a graph first leads to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.torch_internals import gradient_hooks, hooks_behind_accumulation
from torchgpipe.devices.typing import Leaf
from torchgpipe.graph.split_backward import nodes_below

__all__ = ["Leaves"]


class _Leaf:
    """A leaf, with what was there before the proof.

    Args:
        leaf: the leaf, which is held weakly: a forward may make it anew in each run
        name: its name; '' for one that is found in a graph
    """

    def __init__(self, leaf: Tensor, name: str) -> None:
        self.ref, self.name = weakref.ref(leaf), name
        #: In how many graphs it was: one that a forward has made is in one only.
        self.count = 0
        self._grad = leaf.grad
        self._hooks: list[dict[int, Any]] = [gradient_hooks(leaf), hooks_behind_accumulation(leaf)]
        self._before = [dict(by_id) for by_id in self._hooks]
        leaf.grad = None
        for by_id in self._hooks:
            by_id.clear()

    def put_back(self) -> None:
        leaf = self.ref()
        if leaf is not None:
            leaf.grad = self._grad
        for by_id, before in zip(self._hooks, self._before):
            by_id.update(before)


class Leaves:
    """Leaves that are set aside, for a ``with`` block.

    Args:
        named: those that are known, with their names
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]] = ()) -> None:
        self._named = named
        self._leaves: list[_Leaf] = []

    def __enter__(self) -> Leaves:
        self._leaves = [_Leaf(leaf, name) for name, leaf in self._named]
        return self

    def __exit__(self, *_: object) -> None:
        for known in self._leaves:
            known.put_back()

    def note(self, roots: Sequence[Tensor], own: Collection[Tensor] = ()) -> None:
        """Set aside what is at the leaves of a graph, before it is differentiated.

        Args:
            roots: where the graph is entered
            own: the leaves that belong to the run
        """
        own_ids = set(map(id, own))
        known = {id(known.ref()): known for known in self._leaves if known.ref() is not None}
        for node in nodes_below([get_gradient_edge(root) for root in roots]):
            leaf: Tensor | None = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in own_ids:
                if id(leaf) not in known:
                    known[id(leaf)] = _Leaf(leaf, "")
                    self._leaves.append(known[id(leaf)])
                known[id(leaf)].count += 1

    def take(self) -> Iterator[tuple[str, Leaf]]:
        """Yield the gradients that have arrived, with names, and leave none; of the others, those of several graphs."""
        for k, known in enumerate(self._leaves):
            leaf = known.ref()
            if leaf is not None:
                grad, leaf.grad = leaf.grad, None
                if known.name or known.count > 1:
                    yield known.name or f"leaf {k} outside of the model", grad
