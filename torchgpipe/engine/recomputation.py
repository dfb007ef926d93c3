"""A cell that keeps its input only, and runs again at backward.

What makes the second run do what the first run did is in `torchgpipe.replay.runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.torch_internals import gradient_hooks
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.function import Edge
from torchgpipe.replay.generator_locks import own_locks
from torchgpipe.replay.runs import Run

__all__ = ["Recomputation", "entered", "may_need_grad", "roots_of"]


class Recomputation:
    """A cell that runs twice.

    Attributes:
        cell: the cell
    """

    __slots__ = ("_graph", "_run", "cell")

    _run: Run

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        #: The leaves of the second run, and the roots of its graph; None before the second run, and afterwards.
        self._graph: tuple[Leaves, list[Edge | None]] | None = None

    def first_run(self, leaves: Leaves) -> Leaves:
        """Run the cell without a graph.

        Raises:
            RuntimeError: the layers have changed their input in place.
        """
        cell = self.cell
        self._run = Run(cell.call.layers, leaves)
        with cell.recorded("forward"):
            outputs = self._run.first(partial(cell.compute, leaves))
            if self._run.is_compared:
                self._run.note(outputs)
        return outputs

    @property
    def is_ready(self) -> bool:
        """Whether the second run has left a graph to differentiate."""
        return self._graph is not None

    def second_run(self, saved: Leaves) -> None:
        """Run the cell again, with a graph, in the caller's settings.

        Args:
            saved: the leaves of the first run

        Raises:
            RuntimeError: the layers, their parameters or their random numbers are not those of the first run.
            Exception: what a layer raises, with a note of the cell.
        """
        try:
            with self.cell.recorded("recomputation"):
                self._graph = self.cell.call.ambient.run(self._recompute, saved)
        except BaseException as error:
            self.cell.failed(error, "recomputation")
            raise

    def _recompute(self, saved: Leaves) -> tuple[Leaves, list[Edge | None]]:
        cell, call = self.cell, self.cell.call
        # Detached, and so the leaves of a graph of their own.
        leaves = tuple([None if x is None else x.detach().requires_grad_(x.requires_grad) for x in saved])
        # A program may hold generators for this backward, which the caller's settings do not know of.
        locks = own_locks() if call.in_program else nullcontext()
        # The engine enters no device for a node whose outputs are on the host.
        with call.stream.use(), locks:
            outputs = self._run.second(partial(cell.compute, leaves))
            self._run.compare(outputs)
        call.forget_casts()
        for leaf in leaves:
            if leaf is not None and not call.in_program:
                # Layers that hook their input have done so in the first run, too, whose input is in the caller's graph.
                gradient_hooks(leaf).clear()
        return leaves, roots_of(outputs)

    def drop(self) -> None:
        """Drop the graph of the second run, whose outputs need no gradient in this pass."""
        self._graph = None

    def differentiate(self, grads: Leaves, *, runs_again: bool) -> list[Leaf]:
        """Differentiate the graph of the second run, and drop the graph.

        Args:
            grads: the gradients of the outputs
            runs_again: whether the cell may have to run once more, for another backward pass

        Returns:
            the gradients of the input leaves
        """
        assert self._graph is not None
        (leaves, roots), self._graph = self._graph, None
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        with self.cell.differentiating():
            if len(roots) != len(grads):
                raise RuntimeError(
                    f"{self.cell.call.where} returned {len(roots)} values in recomputation but {len(grads)} before; it "
                    "must do the same both times, or run with checkpoint='never'"
                )
            edges, arrived = entered(roots, grads)
            result = iter(self.cell.call.sink(edges, arrived, wanted, False) if edges else [None] * len(wanted))
        if not runs_again:
            self._run.forget()  # The engine drops its part now as well.
        return [next(result) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def may_need_grad(leaves: Leaves, outputs: Leaves) -> list[bool]:
    """Return for each output of a first run, which has no graph, whether it may need a gradient.

    What the layers pass on as they got it, such as a mask, needs one if they got it with one. Of others, only the
    second run can tell.
    """
    frozen = {id(leaf) for leaf in leaves if leaf is not None and not leaf.requires_grad}
    return [
        output is not None and (output.is_floating_point() or output.is_complex()) and id(output) not in frozen
        for output in outputs
    ]


def entered(roots: Sequence[Edge | None], grads: Leaves) -> tuple[list[Edge], list[Tensor]]:
    """Return where a graph is entered, and the gradients there, given those of all outputs."""
    pairs = [(root, grad) for root, grad in zip(roots, grads) if root is not None and grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]


def roots_of(outputs: Leaves) -> list[Edge | None]:
    """Return where the gradients of ``outputs`` enter their graph; None for an output that needs no gradient."""
    return [None if output is None or not output.requires_grad else get_gradient_edge(output) for output in outputs]
