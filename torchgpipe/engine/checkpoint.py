"""Cells as nodes of the caller's autograd graph: checkpointing at forward, recomputation at backward.

A cell with a graph of its own is one node in the caller's graph, `Checkpoint` or `Keep`. Between partitions on several
devices, the two halves of the backward of `Checkpoint` are two nodes:

    forward   inputs ──► Checkpoint ──► outputs
                             └─phony──► Recompute ──phony──► the next cell of this device
    backward  1. Recompute runs the cell again, now with a graph.
              2. Checkpoint differentiates that graph, when the gradient of the outputs has arrived.

`Recompute` takes nothing but a phony from `Checkpoint`, so the engine may run it before the gradient is there. It hands
the phony on to the `Checkpoint` of the next micro-batch, so it runs after that `Checkpoint` has finished: no more than
one recomputed micro-batch is alive on a device. Where one thread runs all cells, the engine takes nodes in the reverse
order of their creation anyway, and nothing is gained by starting early. Then there is no `Recompute`, and `Checkpoint`
runs the cell again itself.

The parameters are no inputs of these nodes: their gradients go another way (see `gradients`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import keeps_graph
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.function import Function, mark_frozen
from torchgpipe.engine.kept import KeptGraph
from torchgpipe.engine.phony import get_phony
from torchgpipe.engine.recomputation import Recomputation, may_need_grad

__all__ = ["Checkpoint", "Keep", "Recompute"]


class Checkpoint(Function):
    """Forward: the first run. Backward: differentiates the second run.

    Its arguments are the recomputation; the lane, a phony from the micro-batch before, or None; the phony of the
    gradients of parameters; and then the leaves. Where cells are tied to each other, a phony comes before the outputs.
    """

    @staticmethod
    def forward(ctx: Any, recomputation: Recomputation, _lane: Leaf, _gradients: Tensor, *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        ctx.lane_device = recomputation.cell.call.lane_device
        outputs = recomputation.first_run(leaves)
        ctx.save_for_backward(*leaves)
        aliases = _detached(outputs)
        mark_frozen(ctx, aliases, may_need_grad(leaves, outputs))
        return aliases if ctx.lane_device is None else (get_phony(ctx.lane_device), *aliases)

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        _refuse_create_graph()
        recomputation: Recomputation = ctx.recomputation
        grads = grads if ctx.lane_device is None else grads[1:]
        result: list[Leaf] = [None] * (len(ctx.needs_input_grad) - 3)
        if all([grad is None for grad in grads]):
            recomputation.drop()
        else:
            if not recomputation.is_ready:
                recomputation.second_run(ctx.saved_tensors)
            result = recomputation.differentiate(grads, runs_again=keeps_graph())
        return None, _on_the_lane(ctx), None, *result


class Recompute(Function):
    """Forward: nothing. Backward: the second run of the `Checkpoint` node that made ``x``."""

    @staticmethod
    def forward(ctx: Any, checkpoint: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.checkpoint = checkpoint
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        _refuse_create_graph()
        ctx.checkpoint.recomputation.second_run(ctx.checkpoint.saved_tensors)
        return None, grad


class Keep(Function):
    """Forward: the only run. Backward: differentiates it. Its arguments are those of `Checkpoint`."""

    @staticmethod
    def forward(ctx: Any, kept: KeptGraph, _lane: Leaf, _gradients: Tensor, *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.kept = kept
        ctx.lane_device = kept.cell.call.lane_device
        outputs = kept.only_run(leaves)
        aliases = _detached(outputs)
        mark_frozen(ctx, aliases, [output is not None and output.requires_grad for output in outputs])
        return aliases

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        _refuse_create_graph()
        needed = ctx.needs_input_grad[3:]
        result: list[Leaf] = [None] * len(needed)
        if any([grad is not None for grad in grads]):
            result = ctx.kept.differentiate(grads, needed, keep_graph=keeps_graph())
        return None, _on_the_lane(ctx), None, *result


def _detached(outputs: Leaves) -> Leaves:
    # Aliases, because an output that is an input, or a view of one, would bring that one's history.
    return tuple([None if output is None else output.detach() for output in outputs])


def _on_the_lane(ctx: Any) -> Leaf:
    """Return a gradient for the lane, if there is one: on its device, where the engine then goes on."""
    return get_phony(ctx.lane_device) if ctx.lane_device is not None and ctx.needs_input_grad[1] else None


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True cannot go through a checkpointed partition, whose graph is freed as soon as it "
            "has been differentiated; use checkpoint='never' for gradients of gradients, outside of record() and of "
            "torch.profiler"
        )
