"""Arbitrary dependencies between tensors in the autograd graph.

The engine is free to run the backward of independent micro-batches in any order. A pipeline needs one order on
each device, the reverse of forward; in another order, many recomputed micro-batches would be alive at once. `Fork`
branches a phony off all outputs of a cell, and `Join` ties that phony to another tensor:

    x ──── Fork ──── x'              backward: the gradient leaves y before it
             └─phony─┐               reaches x, though y is not computed from x
    y ──────────── Join ──── y'

A checkpointed cell needs neither: its own nodes carry the phony (see `drive.nodes`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchgpipe.graph.function import Function
from torchgpipe.graph.phony import get_phony

__all__ = ["Fork", "Join", "fork", "join"]


def fork(*xs: Tensor) -> tuple[Tensor, ...]:
    """Branch a phony off tensors of one device that require grad, and return the tensors and the phony."""
    result: tuple[Tensor, ...] = Fork.apply(*xs)
    return result


def join(x: Tensor, *phonies: Tensor) -> Tensor:
    """Tie phonies to ``x``: the tensors that the phonies come from are differentiated after what uses ``x``."""
    result: Tensor = Join.apply(x, *phonies)
    return result


class Fork(Function):
    """Forward: aliases of the tensors, and a phony. Backward: the gradients of the aliases."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return *[x.detach() for x in xs], get_phony(xs[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[:-1]


class Join(Function):
    """Forward: an alias of the tensor. Backward: its gradient, and a gradient for each phony."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *phonies: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.devices = [phony.device for phony in phonies]
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        # A defined gradient on the phony's own device lets the engine continue on that device's thread.
        return grad, *map(get_phony, ctx.devices)
