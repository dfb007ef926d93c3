"""A cell of a Sequential, which runs the layers of its column: once, or first without a graph and again at backward.

    runs once     forward: the layers, with a graph          backward: differentiate
    runs twice    forward: the layers, without a graph       backward: recompute, with a graph; differentiate

What makes the second run do what the first run did is in `torchgpipe.replay.runs`. A cell keeps no tensor of its input:
whoever drives it does, and hands the input to `recompute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.batch.microbatch import Batch
from torchgpipe.cell.cell import Cell
from torchgpipe.cell.layers_column import LayersColumn
from torchgpipe.devices.torch_internals import current_pass, forget_parametrizations, gradient_hooks, will_run
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.graph.function import Edge
from torchgpipe.graph.split_backward import nodes_below
from torchgpipe.replay.runs import Run

__all__ = ["LayersCell", "SecondRun"]


#: In the place of a grad mode that is set already.
_unchanged = nullcontext()


class SecondRun(NamedTuple):
    """A second run, which one backward pass differentiates.

    Attributes:
        leaves: the leaves of its graph
        edges: where the gradients of its outputs enter the graph; None for one that needs none
    """

    leaves: list[Tensor]
    edges: list[Edge | None]


class LayersCell(Cell):
    """Micro-batch ``i`` in a column of layers.

    Args:
        i: the micro-batch
        column: the column
    """

    __slots__ = ("_again", "_input", "_output", "_run")

    column: LayersColumn

    def __init__(self, i: int, column: LayersColumn) -> None:
        super().__init__(i, column)
        self._run: Run | None = None
        #: A second run that waits to be differentiated. A list, because two passes may want it, in two threads.
        self._again: list[SecondRun] = []

    def begin(self, batch: Batch) -> None:
        """Note the structure of the input, for `compute`."""
        self._input = batch.replace(())

    def compute(self, leaves: Leaves) -> Leaves:
        """Run the layers on the leaves of the input, and return the leaves of the output."""
        output = self.column.run_layers(self._input.replace(leaves))
        leaves = output.leaves
        output.leaves = ()  # `end` needs the structure. With the leaves in it, the cell would keep its output alive.
        self._output = output
        return leaves

    def end(self, leaves: Leaves) -> Batch:
        """Return the output with these leaves, in the structure that the layers have returned."""
        return self._output.replace(leaves)

    # ----------------------------------------------------------------------------------------------------- forward

    def forward(self, leaves: Leaves, *, recomputes: bool) -> Leaves:
        """Run the layers, with `exports` for the outputs, and return the outputs without history.

        Args:
            leaves: the leaves of the input
            recomputes: whether to leave no graph, and to run again at backward

        Raises:
            RuntimeError: the layers will run again, but have changed their input in place.
        """
        column, number = self.column, self.column.j
        # Autograd functions run without gradients already; setting a mode adds 1% to the host time of a tiny cell.
        changes = torch.is_grad_enabled() is recomputes
        with column.recorded("forward", self.i), torch.set_grad_enabled(not recomputes) if changes else _unchanged:
            if recomputes:
                self._run = Run(column.layers, _as_they_are)
                outputs = self._run.first(partial(self.compute, leaves), leaves)
                # What the layers pass on as they got it, such as a mask, needs a gradient if they got it with one. Of
                # others, only the second run can tell.
                frozen = [id(leaf) for leaf in leaves if leaf is not None and not leaf.requires_grad]
                self.exports = [
                    self.kind_of_export(None, number)
                    if output is not None
                    and (output.is_floating_point() or output.is_complex())
                    and id(output) not in frozen
                    else None
                    for output in outputs
                ]
            else:
                with column.layers.exclusively():
                    forget_parametrizations()
                    outputs = self.compute(self._enter(leaves))
                    column.forget_casts()
                    forget_parametrizations()
                self.exports = [
                    None if edge is None else self.kind_of_export(edge, number) for edge in _edges_of(outputs)
                ]
        return tuple([None if output is None else output.detach() for output in outputs])

    def _enter(self, leaves: Leaves) -> Leaves:
        """Return an input at the beginning of the graph, as far as it requires grad."""
        graph = self._begin_graph()
        # Detached, or the graph would go on into that of whoever has computed them.
        trained = [leaf.detach() for leaf in leaves if leaf is not None and leaf.requires_grad]
        entered = iter(graph.enter(*trained) if trained else ())
        return tuple([next(entered) if leaf is not None and leaf.requires_grad else leaf for leaf in leaves])

    # ---------------------------------------------------------------------------------------------------- backward

    @property
    def recomputes(self) -> bool:
        """Whether the layers run again at backward."""
        return self._run is not None

    def recompute_ahead(self, leaves: Leaves) -> None:
        """Run the layers again before the gradients have arrived; see `recompute`."""
        self._again = [self.recompute(leaves)]

    def take_second_run(self) -> SecondRun | None:
        """Return the second run that waits to be differentiated, if there is one; nobody else gets it."""
        try:
            return self._again.pop()
        except IndexError:
            return None

    def recompute(self, leaves: Leaves) -> SecondRun:
        """Run the layers again, with a graph, in the caller's settings.

        Args:
            leaves: the leaves of the input, as in `forward`

        Raises:
            RuntimeError: the layers, their parameters, their random numbers or their outputs are not those of the first
                run.
            Exception: what a layer raises, with a note of the cell.
        """
        try:
            with self.column.finding_parameters(), self.column.recorded("recomputation", self.i):
                return self.column.ambient.run(self._recompute, leaves)
        except BaseException as error:
            self.column.note(error, self.i, "recomputation")
            raise

    def _recompute(self, leaves: Leaves) -> SecondRun:
        assert self._run is not None
        column = self.column
        # Detached, and so the leaves of a graph of their own: it needs no cut, because its input is kept anyway.
        inputs = tuple([None if x is None else x.detach().requires_grad_(x.requires_grad) for x in leaves])
        # The engine enters no device for a node whose outputs are on the host.
        with column.stream.use():
            outputs = self._run.second(partial(self.compute, inputs))
        column.forget_casts()
        trained = [leaf for leaf in inputs if leaf is not None and leaf.requires_grad]
        if not column.in_program:
            for leaf in trained:
                # Layers that hook their input have done so in the first run, too, whose input is in the caller's graph.
                gradient_hooks(leaf).clear()
        if len(outputs) != len(self.exports):
            raise RuntimeError(
                f"{column.where} returned {len(outputs)} values in recomputation but {len(self.exports)} before; it "
                "must do the same both times, or run with checkpoint='never'"
            )
        return SecondRun(trained, _edges_of(outputs))

    def differentiate(
        self, grads: Sequence[Leaf], *, split: bool = False, keep_graph: bool = False, again: SecondRun | None = None
    ) -> list[Leaf]:
        """Differentiate the graph; see `Cell.differentiate`.

        Args:
            grads: the gradients of the outputs
            split: whether to leave the gradients of the parameters for later; not of a second run
            keep_graph: whether the graph will be differentiated again, or the cell recomputed again
            again: the second run, if the layers run twice (default: that which has run ahead)
        """
        if self._run is not None:
            return self._differentiate_again(grads, again or self.take_second_run(), keep_graph)
        try:
            return super().differentiate(grads, split=split, keep_graph=keep_graph)
        except RuntimeError as error:
            edges = [end.edge for end in self.exports if end is not None and end.edge is not None]
            # The pass of the caller has freed it.
            if current_pass() >= 0 and any(map(will_run, _operations(edges))):
                raise self.column.by_itself() from error
            raise

    def _differentiate_again(self, grads: Sequence[Leaf], again: SecondRun | None, keep_graph: bool) -> list[Leaf]:
        if all([grad is None for grad in grads]):
            return []
        assert again is not None, "the layers have not run again"
        pairs = [(edge, grad) for edge, grad in zip(again.edges, grads) if edge is not None and grad is not None]
        result: list[Leaf] = []
        if pairs:
            with self.told("backward"):
                result = self.column.sink([edge for edge, _ in pairs], [grad for _, grad in pairs], again.leaves, False)
        if not keep_graph:
            assert self._run is not None
            self._run.forget()  # The engine drops its part now as well.
        return result


def _as_they_are(outputs: Leaves) -> Leaves:
    return outputs


def _edges_of(outputs: Sequence[Tensor | None]) -> list[Edge | None]:
    """Return where the gradients of ``outputs`` enter their graph; None for an output that needs no gradient."""
    return [None if output is None or not output.requires_grad else get_gradient_edge(output) for output in outputs]


def _operations(edges: Sequence[Edge]) -> list[Any]:
    """Return the nodes of a graph that no other graph has: all but those at which gradients are accumulated."""
    return [node for node in nodes_below(list(edges)) if type(node).__name__ != "AccumulateGrad"]
