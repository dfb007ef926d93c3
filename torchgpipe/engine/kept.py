"""A cell that runs once and keeps its graph, which is a graph of its own.

With 'except_last', the last micro-batch would be recomputed at once, so it keeps the graph of its only run. If that
graph were part of the caller's, the engine would hold the gradients of its parameters until the gradients of all other
micro-batches are there. A mini-batch that is recorded keeps the graphs of all cells in this way, so that the backward
of a cell is one call, with a beginning and an end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import forget_parametrizations
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.function import Edge, Function
from torchgpipe.engine.partition_call import PartitionCall
from torchgpipe.engine.phony import get_phony
from torchgpipe.engine.recomputation import differentiate, roots_of
from torchgpipe.engine.record import Kind
from torchgpipe.engine.split_backward import SplitBackward

__all__ = ["Enter", "KeptGraph"]


class KeptGraph:
    """A cell that runs once.

    Attributes:
        cell: the cell
    """

    __slots__ = ("_entrance", "_roots", "_split", "cell")

    _roots: list[Edge | None]
    _split: SplitBackward

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self._entrance = _Entrance(cell.call)

    def only_run(self, leaves: Leaves) -> Leaves:
        """Run the cell with a graph that begins at its inputs, and keep the graph."""
        cell = self.cell
        with cell.recorded("forward"), torch.enable_grad():
            forget_parametrizations()
            outputs = cell.compute(self._entrance.enter(leaves))
            cell.call.forget_casts()
            forget_parametrizations()
        self._roots = roots_of(outputs)
        return outputs

    def differentiate(
        self, grads: Leaves, needed: Sequence[bool], *, keep_graph: bool, kind: Kind = "backward"
    ) -> list[Leaf]:
        """Differentiate the graph.

        Args:
            grads: the gradients of the outputs
            needed: for each input, whether it requires grad
            keep_graph: whether the graph will be differentiated again
            kind: what to call the work

        Returns:
            the gradients of the inputs
        """
        with self._entrance.taking() as taken:
            leaves = [self._entrance.leaf] if any(needed) else []
            differentiate(self.cell, self._roots, grads, leaves, keep_graph=keep_graph, kind=kind)
        result = iter(taken or [None] * sum(needed))
        return [next(result) if need else None for need in needed]

    def differentiate_inputs(self, grads: Leaves, needed: Sequence[bool]) -> list[Leaf] | None:
        """Return the gradients of the inputs, and leave those of the weights to `differentiate_weights`.

        None, if the graph has to be differentiated at once.
        """
        entered = [(root, grad) for root, grad in zip(self._roots, grads) if root is not None and grad is not None]
        if not entered:
            return None
        edges, arriving = zip(*entered)
        split = SplitBackward(edges, self._entrance.leaf)
        if not split.is_possible:
            return None
        with self._entrance.taking() as taken, self.cell.differentiating("backward of the input"):
            split.differentiate_inputs(arriving)
        self._split, self._roots = split, []
        result = iter(taken or [None] * sum(needed))
        return [next(result) if need else None for need in needed]

    def differentiate_weights(self) -> None:
        """Add the gradients of the weights to ``.grad``, after `differentiate_inputs`."""
        with self.cell.differentiating("backward of the weights"):
            self._split.differentiate_weights()


class _Entrance:
    """The inputs of a graph that is kept, without their memory, which the layers may not need at backward.

    The graph holds its entrance. The entrance does not hold the graph, or the two would be a cycle.

    Args:
        call: the call of the partition

    Attributes:
        leaf: the leaf of the graph, in place of the inputs
    """

    __slots__ = ("_call", "_taken", "leaf")

    def __init__(self, call: PartitionCall) -> None:
        self.leaf = get_phony(call.device).requires_grad_()
        self._call = call
        #: By thread, the gradients of the inputs in a backward pass: two threads may differentiate one graph.
        self._taken: dict[int, list[Leaf]] = {}

    def enter(self, leaves: Leaves) -> Leaves:
        """Return the inputs for a graph that begins here."""
        # Detached, or the graph would go on into the caller's.
        trained = [leaf.detach() for leaf in leaves if leaf is not None and leaf.requires_grad]
        entered = iter(Enter.apply(self, self.leaf, *trained) if trained else ())
        return tuple([next(entered) if leaf is not None and leaf.requires_grad else leaf for leaf in leaves])

    def take(self, grads: Leaves) -> None:
        """Take the gradients of the inputs, in the backward of `Enter`.

        Raises:
            RuntimeError: the gradients do not come from the outputs of the cell.
        """
        taken = self._taken.get(get_ident())
        if taken is None:
            raise RuntimeError(
                f"a tensor from the midst of {self._call.where} was differentiated by itself, so the layers before it "
                "would not get its gradient; return it as an output of the layers, or use checkpoint='never'"
            )
        taken[:] = grads

    @contextmanager
    def taking(self) -> Iterator[list[Leaf]]:
        """Give a list that `take` fills during a backward pass in the ``with`` block."""
        here = get_ident()
        outer = self._taken.get(here)  # A hook may start another pass through the same graph.
        taken: list[Leaf] = []
        self._taken[here] = taken
        try:
            yield taken
        finally:
            if outer is None:
                del self._taken[here]
            else:
                self._taken[here] = outer


class Enter(Function):
    """Forward: aliases of the inputs of a graph that is kept. Backward: takes their gradients out of the graph."""

    @staticmethod
    def forward(ctx: Any, entrance: _Entrance, _leaf: Tensor, *leaves: Tensor) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.entrance = entrance
        return tuple([leaf.detach() for leaf in leaves])

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[None, ...]:
        ctx.entrance.take(grads)
        return (None,) * len(ctx.needs_input_grad)
