"""Moving a micro-batch from device to device beside the computation, forward and backward.

Every device has a stream that computes and, for each direction, one that copies. `Wait` closes the cell that
sends and `Copy` opens the cell that receives:

    source device                    target device
    computing     leaving            arriving      computing
        │            │                  │              │
     cell (i,j-1)    │                  │           cell (i-1,j)    the copy overlaps with both
        ├───Wait────►│                  │              │            computations
     cell (i+1,j-1)  ╞══════Copy═══════►│              │
        │            │                  ├────Copy─────►│
        │            │                  │           cell (i,j)

Backward walks through the same figure from right to left, every arrow turned round. The wait of the source for
the arriving gradient is a node of its own, `Wait`, so that what does not need the gradient, the recomputation,
can be launched before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.function import Function
from torchgpipe.stream import Stream
from torchgpipe.typing import Leaf, Leaves

__all__ = ["Copy", "Route", "Wait", "copy", "wait"]


class Route(NamedTuple):
    """The streams on the way from one device to another, in the order of the figure above."""

    source: Stream
    leaving: Stream
    arriving: Stream
    target: Stream

    @property
    def reversed(self) -> Route:
        return Route(*self[::-1])


def wait(routes: Sequence[Route], leaves: Leaves) -> Leaves:
    """Lets the copies of ``leaves`` start after what computes them; the end of the cell that sends.

    One node for all that leaves a cell, whichever way it goes.
    """
    if _needs_graph(leaves):
        waiting: Leaves = Wait.apply(routes, *leaves)
        return waiting
    _let_leave(routes)
    return leaves


def _let_leave(routes: Sequence[Route]) -> None:
    for route in routes:
        route.leaving.wait(route.source)


def copy(route: Route, leaves: Leaves) -> Leaves:
    """Brings ``leaves`` to the target of ``route``; the start of the cell that receives."""
    moved: Leaves = Copy.apply(route, *leaves) if _needs_graph(leaves) else _copy(route, leaves)
    return moved


def _needs_graph(leaves: Leaves) -> bool:
    return torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)


def _copy(route: Route, leaves: Leaves) -> Leaves:
    # A copy between two devices is launched on the current streams of both.
    with route.leaving.use(), route.arriving.use():
        moved = tuple(None if leaf is None else _copy_tensor(route, leaf) for leaf in leaves)
    route.target.wait(route.arriving)
    return moved


def _copy_tensor(route: Route, tensor: Tensor) -> Tensor:
    moved = tensor.to(route.arriving.device, copy=True)
    route.leaving.record(tensor)  # allocated on the source's stream, read on this one
    route.target.record(moved)  # allocated on the arriving stream, read by the computation
    return moved


class Wait(Function):
    """Forward: the leaving streams wait for the source. Backward: the source waits for the leaving streams."""

    @staticmethod
    def forward(ctx: Any, routes: Sequence[Route], *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.routes = routes
        _let_leave(routes)
        return tuple(None if leaf is None else leaf.detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        for route in ctx.routes:
            route.source.wait(route.leaving)
        return None, *grads


class Copy(Function):
    """Forward: brings the leaves from the source to the target. Backward: brings their gradients back."""

    @staticmethod
    def forward(ctx: Any, route: Route, *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.route = route
        return _copy(route, leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        route: Route = ctx.route.reversed
        route.leaving.wait(route.source)
        with route.leaving.use(), route.arriving.use():
            moved = tuple(None if grad is None else _copy_tensor(route, grad) for grad in grads)
        return None, *moved
