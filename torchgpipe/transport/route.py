"""Moving a micro-batch from device to device beside the computation, forward and backward.

Every device has a stream that computes, and others that copy. Where autograd drives, `Wait` closes the cell that sends
and `Copy` opens the cell that receives; a program, whose graphs are cut there, calls `mark_ready`, `copy_forward`,
`copy_back` and `wait_back` for the same waits:

    source device                    target device
    computing     leaving            arriving      computing
        │            │                  │              │
     cell (i,j-1)    │                  │           cell (i-1,j)    the copy overlaps with both
        ├───Wait────►│                  │              │            computations
     cell (i+1,j-1)  ╞══════Copy═══════►│              │
        │            │                  ├────Copy─────►│
        │            │                  │           cell (i,j)

Backward goes through the same figure from right to left, with every arrow reversed, on copying streams for gradients
only: a schedule such as 1F1B copies in both directions at once, and on one stream an input would wait for the backward
whose gradient is copied before it. The source waits for the arriving gradient in a node of its own, `Wait`. The
recomputation does not need the gradient, so it can be launched before that.

The two ends are in different threads, and the sender may have launched its next cell before the receiver launches
the copy. So the sender marks where a micro-batch is ready, and the copy waits for that mark, not for the whole stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from torchgpipe.devices import links
from torchgpipe.devices.stream import Mark, Stream, Streams
from torchgpipe.devices.torch_internals import is_shared
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.graph.function import Function, mark_frozen
from torchgpipe.listener.listener import Listener, recorded

__all__ = ["Copy", "Route", "Wait", "copy", "copy_back", "copy_forward", "mark_ready", "release", "wait", "wait_back"]


@dataclass(frozen=True, eq=False)
class Route:
    """The streams from one device to another, in the order of the figure above, and those that copy gradients back.

    Attributes:
        grads_leaving: the stream of the target's device
        grads_arriving: the stream of the source's device
        ends: the partitions at both ends
        listener: the listener of the mini-batch, if there is one
        ready: by micro-batch, the mark on ``source`` behind the computation of the leaves
        back: by micro-batch, the mark on ``grads_arriving`` behind the copy of the gradients
    """

    source: Stream
    leaving: Stream
    arriving: Stream
    target: Stream
    grads_leaving: Stream
    grads_arriving: Stream
    ends: tuple[int, int] = (0, 1)
    listener: Listener | None = None
    ready: dict[int, Mark] = field(default_factory=dict)
    back: dict[int, Mark] = field(default_factory=dict)

    @staticmethod
    def between(
        source: Stream,
        target: Stream,
        streams: Streams,
        ends: tuple[int, int],
        listener: Listener | None,
        load: str = "",
    ) -> Route | None:
        """Return the route between the streams that compute, or None if their devices share a memory.

        Args:
            source: the stream that computes what is copied
            target: the stream that computes with it
            streams: the source of the streams that copy
            ends: the partitions at both ends
            listener: the listener of the mini-batch, if there is one
            load: what is copied, if it has streams of its own
        """
        if not streams.moves(source.device, target.device):
            return None
        on_source, on_target = partial(streams.side, source.device), partial(streams.side, target.device)
        leaving, arriving = on_source(f"{load}leaving"), on_target(f"{load}arriving")
        back = on_target(f"{load}gradient leaving"), on_source(f"{load}gradient arriving")
        return Route(source, leaving, arriving, target, *back, ends, listener)


def wait(routes: Sequence[Route], i: int, leaves: Leaves) -> Leaves:
    """Let copies of ``leaves`` start once ``leaves`` are computed: the end of the cell that sends.

    All leaves of a cell share one node, whichever route they take.

    Args:
        routes: the routes that the leaves take
        i: the micro-batch
        leaves: the output of the cell, and the skips that it sends
    """
    if _needs_graph(leaves):
        waiting: Leaves = Wait.apply(routes, i, *leaves)
        return waiting
    mark_ready(routes, i)
    return leaves


def mark_ready(routes: Sequence[Route], i: int) -> None:
    """Mark on the source of ``routes``, which is that of all of them, where micro-batch ``i`` is computed."""
    if routes:
        mark = routes[0].source.mark()
        for route in routes:
            route.ready[i] = mark


def copy(route: Route, i: int, leaves: Leaves) -> Leaves:
    """Copy ``leaves`` of micro-batch ``i`` to the target of ``route``: the start of the cell that receives."""
    moved: Leaves = Copy.apply(route, i, *leaves) if _needs_graph(leaves) else _copy(route, i, leaves)
    return moved


def copy_forward(route: Route, i: int, leaves: Leaves) -> Leaves:
    """Copy ``leaves`` of micro-batch ``i`` to the target of ``route``, where they are leaves of a graph again."""
    with torch.no_grad():
        moved = _copy(route, i, leaves)
    for old, new in zip(leaves, moved):
        if old is not None and new is not None:
            new.requires_grad_(old.requires_grad)
    return moved


def _needs_graph(leaves: Leaves) -> bool:
    return torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)


def _copy(route: Route, i: int, leaves: Leaves) -> Leaves:
    a, c = route.ends
    route.leaving.wait(route.ready[i])
    with recorded(route.listener, "copy", i, a, c, route.leaving):
        moved = _move(route.leaving, route.arriving, route.target, leaves)
    with recorded(route.listener, "wait", i, c, a, route.target):
        route.target.wait(route.arriving.mark())
    return moved


def copy_back(route: Route, i: int, grads: Leaves) -> Leaves:
    """Copy gradients of micro-batch ``i`` from the target of ``route`` to its source."""
    a, c = route.ends
    route.grads_leaving.wait(route.target.mark())
    with recorded(route.listener, "copy", i, c, a, route.grads_leaving):
        moved = _move(route.grads_leaving, route.grads_arriving, route.source, grads)
    if any([grad is not None and is_shared(grad) for grad in grads]):
        # The gradient of a parameter as well, as of p in x + p. Autograd adds that of the next micro-batch in place.
        route.target.wait(route.grads_leaving.mark())
    route.back[i] = route.grads_arriving.mark()
    if torch.is_anomaly_enabled():
        # The engine looks for NaN in what this node returns, on a stream that waits for nothing.
        route.grads_arriving.synchronize()
    return moved


def wait_back(routes: Sequence[Route], i: int) -> None:
    """Let the sources of ``routes`` wait for the gradients that are on their way back."""
    for route in routes:
        if i in route.back:  # Leaves that the target has not used have no gradient.
            a, c = route.ends
            with recorded(route.listener, "wait", i, a, c, route.source):
                route.source.wait(route.back[i])


def release(routes: Sequence[Route]) -> None:
    """Let the sources of ``routes`` wait for what leaves them, at the end of a call.

    An output of a partition may be memory of the caller's, such as the input, a parameter or a buffer. The caller may
    overwrite it as soon as the call returns, and knows nothing of the streams that copy.
    """
    for source, leaving in dict.fromkeys([(route.source, route.leaving) for route in routes]):
        source.wait(leaving.mark())


def _move(leaving: Stream, arriving: Stream, target: Stream, leaves: Leaves) -> Leaves:
    # A copy between two devices is launched on the current streams of both.
    with leaving.use(), arriving.use():
        moved = tuple([None if leaf is None else links.to(leaf, arriving.device, copy=True) for leaf in leaves])
    for leaf, new in zip(leaves, moved):
        if leaf is not None and new is not None:
            leaving.record(leaf)  # allocated on the source's stream, read on this one
            target.record(new)  # allocated on the arriving stream, read by the computation
    return moved


class Wait(Function):
    """Forward: mark where the leaves are ready. Backward: let the source wait for their gradients."""

    @staticmethod
    def forward(ctx: Any, routes: Sequence[Route], i: int, *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.routes, ctx.i = routes, i
        mark_ready(routes, i)
        outputs = tuple([None if leaf is None else leaf.detach() for leaf in leaves])
        mark_frozen(ctx, outputs, ctx.needs_input_grad[2:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        wait_back(ctx.routes, ctx.i)
        return None, None, *grads


class Copy(Function):
    """Forward: copy the leaves from the source to the target. Backward: copy their gradients back."""

    @staticmethod
    def forward(ctx: Any, route: Route, i: int, *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.route, ctx.i = route, i
        outputs = _copy(route, i, leaves)
        mark_frozen(ctx, outputs, ctx.needs_input_grad[2:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        return None, None, *copy_back(ctx.route, ctx.i, grads)
