"""A cell of a Sequential that runs once and keeps its graph, which is a graph of its own.

With 'except_last', the last micro-batch would be recomputed at once, so it keeps the graph of its only run. If that
graph were part of the caller's, the engine would hold the gradients of its parameters until the gradients of all other
micro-batches are there. A mini-batch that is recorded keeps the graphs of all cells in this way, so that the backward
of a cell is one call, with a beginning and an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchgpipe.devices.torch_internals import current_pass, forget_parametrizations, will_run
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.cut import CutGraph
from torchgpipe.engine.function import Edge
from torchgpipe.engine.recomputation import entered, roots_of
from torchgpipe.engine.split_backward import nodes_below

__all__ = ["KeptGraph"]


class KeptGraph:
    """A cell that runs once.

    Attributes:
        cell: the cell
    """

    __slots__ = ("_cut", "_roots", "cell")

    _roots: list[Edge | None]

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self._cut = CutGraph(cell.call.device, cell.call.by_itself)

    def only_run(self, leaves: Leaves) -> Leaves:
        """Run the cell with a graph that begins at its inputs, and keep the graph."""
        cell = self.cell
        # Detached, or the graph would go on into the caller's.
        trained = [leaf.detach() for leaf in leaves if leaf is not None and leaf.requires_grad]
        with cell.recorded("forward"), torch.enable_grad(), cell.call.layers.exclusively():
            forget_parametrizations()
            begun = iter(self._cut.enter(*trained) if trained else ())
            inputs = tuple([next(begun) if leaf is not None and leaf.requires_grad else leaf for leaf in leaves])
            outputs = cell.compute(inputs)
            cell.call.forget_casts()
            forget_parametrizations()
        self._roots = roots_of(outputs)
        return outputs

    def differentiate(
        self, grads: Leaves, needed: Sequence[bool], *, split: bool = False, keep_graph: bool = False
    ) -> list[Leaf]:
        """Differentiate the graph.

        Args:
            grads: the gradients of the outputs
            needed: for each input, whether it requires grad
            split: whether to leave the gradients of the parameters to `differentiate_weights`, if that is possible
            keep_graph: whether the graph will be differentiated again

        Returns:
            the gradients of the inputs
        """
        edges, arrived = entered(self._roots, grads)
        if not edges:
            return [None] * len(needed)
        cell = self.cell
        try:
            result = iter(
                self._cut.differentiate(
                    edges, arrived, cell.call.sink, cell.differentiating, split=split, keep_graph=keep_graph
                )
            )
        except RuntimeError as error:
            if current_pass() >= 0 and any(map(will_run, _operations(edges))):  # The pass of the caller has freed it.
                raise cell.call.by_itself() from error
            raise
        return [next(result) if need else None for need in needed]

    def differentiate_weights(self) -> None:
        """Run what a split `differentiate` has left, if anything."""
        self._cut.differentiate_weights(self.cell.differentiating)


def _operations(edges: Sequence[Edge]) -> list[Any]:
    """Return the nodes of a graph that no other graph has: all but those at which gradients are accumulated."""
    return [node for node in nodes_below(list(edges)) if type(node).__name__ != "AccumulateGrad"]
