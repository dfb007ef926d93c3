"""A cell that keeps its input only, and runs again at backward.

The second run must do what the first run did: it starts from the same input, draws the same random numbers, and finds
the same layers and parameters. What cannot be made the same is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.torch_internals import forget_parametrizations, gradient_hooks, versions
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.function import Edge
from torchgpipe.replay.generator_locks import own_locks
from torchgpipe.replay.phase import first_run, second_run
from torchgpipe.replay.random import Drawn

__all__ = ["Recomputation", "entered", "roots_of"]


class Recomputation:
    """A cell that runs twice.

    Attributes:
        cell: the cell
    """

    __slots__ = ("_drawn", "_graph", "_versions", "cell")

    #: The random numbers that the first run drew; None once they are forgotten.
    _drawn: Drawn | None
    #: The versions of the parameters during the first run.
    _versions: list[int]

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        #: The leaves of the second run, and the roots of its graph; None before the second run, and afterwards.
        self._graph: tuple[Leaves, list[Edge | None]] | None = None

    def first_run(self, leaves: Leaves) -> Leaves:
        """Run the cell without a graph.

        Raises:
            RuntimeError: the layers have changed their input in place.
        """
        cell, call = self.cell, self.cell.call
        untouched = versions(leaves)
        with cell.recorded("forward"):
            forget_parametrizations()
            before = call.random.begin()
            with first_run():
                outputs = cell.compute(leaves)
            self._drawn = call.random.end(before)
            self._versions = call.versions()
            forget_parametrizations()
            if versions(leaves) != untouched:
                raise RuntimeError(
                    f"{call.where} changes its input in place, so recomputation would start from another input; "
                    "let it work on a copy (input.clone()), let its first layer have the attribute inplace=True, "
                    "which makes the pipeline copy the input, or use checkpoint='never'"
                )
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
                self._refuse_changed()
                self._graph = self.cell.call.ambient.run(self._recompute, saved)
        except BaseException as error:
            self.cell.failed(error, "recomputation")
            raise

    def _recompute(self, saved: Leaves) -> tuple[Leaves, list[Edge | None]]:
        cell, call = self.cell, self.cell.call
        if self._drawn is None:
            raise RuntimeError(
                f"{call.where} draws random numbers that are forgotten: a backward pass has differentiated it and "
                "failed afterwards; call the pipeline again before the next backward()"
            )
        # Detached, and so the leaves of a graph of their own.
        leaves = tuple([None if x is None else x.detach().requires_grad_(x.requires_grad) for x in saved])
        forget_parametrizations()
        # The engine enters no device for a node whose outputs are on the host.
        before = call.state()
        # A program may hold generators for this backward, which the caller's settings do not know of.
        locks = own_locks() if call.in_program else nullcontext()
        with call.stream.use(), locks, call.random.replay(self._drawn), second_run():
            outputs = cell.compute(leaves)
        call.verify_state(before)
        call.forget_casts()
        forget_parametrizations()
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
        if self._drawn and not runs_again:
            self._drawn = None  # The state of a generator takes kilobytes, and the engine drops its part now as well.
        return [next(result) if leaf is not None and leaf.requires_grad else None for leaf in leaves]

    def _refuse_changed(self) -> None:
        """Raise if the layers or parameters have changed since the first run."""
        call = self.cell.call
        change = call.changed()
        if change is None and call.versions() != self._versions:
            change = "a parameter was changed in place since"
        if change is not None:
            raise RuntimeError(
                f"{call.where} is not what it was at forward ({change}), so recomputation would give other "
                "gradients; call backward() before optimizer.step(), train() and eval(), or use checkpoint='never'"
            )


def entered(roots: Sequence[Edge | None], grads: Leaves) -> tuple[list[Edge], list[Tensor]]:
    """Return where a graph is entered, and the gradients there, given those of all outputs."""
    pairs = [(root, grad) for root, grad in zip(roots, grads) if root is not None and grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]


def roots_of(outputs: Leaves) -> list[Edge | None]:
    """Return where the gradients of ``outputs`` enter their graph; None for an output that needs no gradient."""
    return [None if output is None or not output.requires_grad else get_gradient_edge(output) for output in outputs]
