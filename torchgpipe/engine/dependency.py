"""Arbitrary dependencies between tensors in the autograd graph.

The engine is free to run the backward of independent micro-batches in any order. A pipeline needs one order on
each device, the reverse of forward, or else many recomputed micro-batches live at once. `Fork` branches a phony off
some tensors, all outputs of a cell, and `Join` ties it to another:

    x ──── Fork ──── x'              backward: the gradient leaves y before it
             └─phony─┐               enters x, though y is not computed from x
    y ──────────── Join ──── y'

A checkpointed cell needs neither: its own nodes carry the phony (see `checkpoint`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchgpipe.engine.function import Function
from torchgpipe.engine.phony import get_phony

__all__ = ["Fork", "Join", "fork", "join"]


def fork(*xs: Tensor) -> tuple[Tensor, ...]:
    """Branches a phony off tensors of one device that require grad: the tensors and the phony."""
    result: tuple[Tensor, ...] = Fork.apply(*xs)
    return result


def join(x: Tensor, *phonies: Tensor) -> Tensor:
    """Ties phonies to ``x``: whatever they come from is differentiated after what uses ``x``."""
    result: Tensor = Join.apply(x, *phonies)
    return result


class Fork(Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return *[x.detach() for x in xs], get_phony(xs[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[:-1]


class Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *phonies: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.devices = [phony.device for phony in phonies]
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        # A defined gradient on the phony's own device lets the engine continue on that device's thread.
        return grad, *map(get_phony, ctx.devices)
