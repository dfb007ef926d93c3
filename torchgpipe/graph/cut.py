"""The graph of a cell, cut from the graphs of other cells, so that its backward is a call.

The graph begins where tensors of other cells *enter* it, without their history, and ends at its *exits*, whose tensors
other cells have taken:

    cell (i,0)                   cell (i,1)                    cell (i,2)
    ──► a ─────────── exit ┐ ┌─► Enter ──► b ─────────── exit ┐ ┌─► Enter ──► loss
        └──────────── exit ┼─┼────────────────────────────────┘ └─► Enter ──┘
                           └─┘

So the backward of a cell is one pass from its exits, with the gradients that have arrived there. It adds to the
gradients of the parameters, and takes the gradients of what has entered to the exits of the other cells. With a split
backward, it leaves the gradients of the parameters for later.

All of this holds if the cut is complete: if every tensor of another cell has entered. An operation that nobody has
seen, such as a function of `torch.autograd`, may have taken one without. Then a pass would walk from one cell into
another, and gradients would be lost. Two things notice that: a node that is older than its cell (`verify_complete`),
and an entrance that is reached while its own cell is not being differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import sequence_number
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.graph.function import Edge, Function
from torchgpipe.graph.phony import get_phony
from torchgpipe.graph.split_backward import SplitBackward, nodes_below
from torchgpipe.listener.listener import Kind

__all__ = ["CutGraph", "Enter", "Sink", "Told", "differentiated_by_itself", "verify_complete"]

#: Tells the listener of the mini-batch, if there is one, what runs in a ``with`` block, and notes where it failed.
Told: TypeAlias = Callable[[Kind], AbstractContextManager[None]]

#: Differentiates a graph, as `accumulate` does: given where the graph is entered, the gradients there, the leaves whose
#: gradients are wanted beside those of parameters, and whether the graph is kept.
Sink: TypeAlias = Callable[[Sequence[Edge], Sequence[Tensor], Sequence[Tensor], bool], object]


class CutGraph:
    """The graph of a cell.

    Args:
        device: where the cell computes
        by_itself: returns the error for a tensor of this graph that something else than its cell differentiates

    Attributes:
        leaf: the leaf of the graph, in place of all that enters: the graph need not keep the memory of its inputs
    """

    __slots__ = ("_entrance", "_rest", "leaf")

    def __init__(self, device: torch.device, by_itself: Callable[[], RuntimeError]) -> None:
        self.leaf = get_phony(device).requires_grad_()
        self._entrance = _Entrance(by_itself)
        self._rest: Callable[[], object] | None = None

    def enter(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors of other cells, without their history, at the beginning of this graph; one node for all."""
        first = self._entrance.count
        self._entrance.count += len(tensors)
        entered: tuple[Tensor, ...] = Enter.apply(self._entrance, first, self.leaf, *tensors)
        return entered

    def differentiate(
        self,
        edges: Sequence[Edge],
        grads: Sequence[Tensor],
        sink: Sink,
        told: Told,
        *,
        split: bool = False,
        settle: Callable[[], object] = lambda: None,
        keep_graph: bool = False,
    ) -> list[Leaf]:
        """Differentiate the graph.

        Args:
            edges: the exits at which gradients have arrived
            grads: these gradients
            sink: takes the gradients of the parameters
            told: tells the listener
            split: whether to leave the gradients of the parameters to `differentiate_weights`, if that is possible
            settle: called before these are added although ``split`` asks to leave them
            keep_graph: whether the graph will be differentiated again

        Returns:
            the gradient of each tensor that has entered; None for one that was not used
        """
        count = self._entrance.count
        halves = SplitBackward(edges, self.leaf) if split and count else None
        if split and (halves is None or not halves.reaches_inputs):
            # Nobody waits for a gradient, so all of it can be left.
            self._rest = functools.partial(sink, edges, grads, (), keep_graph)
            return [None] * count
        outer = self._entrance.open()
        try:
            if halves is not None and halves.is_possible:
                with told("backward of the input"):
                    halves.differentiate_inputs(grads)
                self._rest = halves.differentiate_weights
            else:
                if split:
                    settle()
                with told("backward"):
                    sink(edges, grads, (self.leaf,) if count else (), keep_graph)
        finally:
            taken = self._entrance.close(outer)
        return [taken.get(k) for k in range(count)]

    @property
    def has_rest(self) -> bool:
        """Whether a split `differentiate` has left anything."""
        return self._rest is not None

    def differentiate_weights(self, told: Told) -> None:
        """Run what a split `differentiate` has left, if anything."""
        rest, self._rest = self._rest, None
        if rest is not None:
            with told("backward of the weights"):
                rest()


class _Entrance:
    """The gradients of what has entered a graph. The graph holds its entrance; the entrance does not hold the graph.

    Args:
        by_itself: returns the error for a pass that comes from elsewhere

    Attributes:
        count: the number of tensors that have entered
    """

    __slots__ = ("_by_itself", "_taken", "count")

    def __init__(self, by_itself: Callable[[], RuntimeError]) -> None:
        self.count = 0
        self._by_itself = by_itself
        #: By thread, the gradients in a backward pass: two threads may differentiate one graph.
        self._taken: dict[int, dict[int, Tensor]] = {}

    def take(self, first: int, grads: Leaves) -> None:
        """Take the gradients of the tensors from number ``first`` on, in the backward of `Enter`.

        Raises:
            RuntimeError: the gradients do not come from the exits of the cell.
        """
        taken = self._taken.get(get_ident())
        if taken is None and len(self._taken) == 1:
            # In a backward pass of the caller, the nodes of another device run in that device's thread.
            (taken,) = self._taken.values()
        if taken is None:
            raise self._by_itself()
        for k, grad in enumerate(grads, first):
            if grad is not None:
                taken[k] = taken[k] + grad if k in taken else grad

    def open(self) -> dict[int, Tensor] | None:
        """Begin a backward pass in this thread, and return what an outer one has taken so far, for `close`."""
        outer = self._taken.get(get_ident())  # A hook may start another pass through the same graph.
        self._taken[get_ident()] = {}
        return outer

    def close(self, outer: dict[int, Tensor] | None) -> dict[int, Tensor]:
        """Return the gradients that a pass has taken, by the number of the tensor."""
        taken = self._taken.pop(get_ident())
        if outer is not None:
            self._taken[get_ident()] = outer
        return taken


class Enter(Function):
    """Forward: tensors without history. Backward: take their gradients out of the graph."""

    @staticmethod
    def forward(ctx: Any, entrance: _Entrance, first: int, leaf: Tensor, *tensors: Tensor) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.entrance, ctx.first = entrance, first
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[None, ...]:
        ctx.entrance.take(ctx.first, grads)
        return (None,) * len(ctx.needs_input_grad)


def verify_complete(edges: Iterable[Edge], span: tuple[int, int], where: str) -> None:
    """Check that the graph of a cell has been made in this cell.

    Args:
        edges: the exits of the cell
        span: the numbers of the autograd nodes that the cell has made: the first, and the one behind the last
        where: the cell, for errors

    Raises:
        RuntimeError: an operation of this cell has taken a tensor of another cell, or of another thread, which has not
            entered, so the pass would go on there.
    """
    begin, end = span
    users: dict[Any, Any] = {}
    for node in nodes_below(list(edges)):
        name = type(node).__name__
        # Autocast hands the cast of a parameter from one micro-batch to the next. The node of a view is made anew when
        # somebody looks, if its base was changed in place since.
        if (
            name not in ("AccumulateGrad", "ToCopyBackward0", "AsStridedBackward0")
            and not begin <= sequence_number(node) < end
        ):
            user = users.get(node)
            by = f"'{type(user).__name__}'" if user is not None else "an operation"
            raise RuntimeError(
                f"in {where}, {by} takes a tensor that '{name}' has made in another partition or thread, or before the "
                "call, and that the pipeline has not seen on its way, as with torch.autograd.Function.apply, scripted "
                "and compiled functions, reentrant checkpointing, objects of classes of your own, and thread pools; "
                "let one module of the spine do it that gets the tensor as an argument, or give a balance that keeps "
                "both in one partition"
            )
        users.update({below: node for below, _ in node.next_functions if below is not None})


def differentiated_by_itself(where: str) -> RuntimeError:
    """Return the error for a tensor from the midst of a model that something else than the pipeline differentiates."""
    return RuntimeError(
        f"a tensor from the midst of {where} was differentiated by itself: by backward() or torch.autograd.grad within "
        "a forward, or because a hook or an attribute has kept it, and what it depends on would not get its gradient; "
        "return it as an output of the model, or let one module of the spine differentiate what begins there"
    )
