"""Cells as nodes of the caller's autograd graph.

A cell with a graph of its own is one node there, `CellNode`: its forward is that of the cell, and its backward
differentiates the cell, which runs again before if it has left no graph. Between partitions on several devices, the two
halves of that backward are two nodes:

    forward   inputs ──► CellNode ──► outputs
                             └─phony──► Recompute ──phony──► the next cell of this device
    backward  1. Recompute runs the cell again, now with a graph.
              2. CellNode differentiates that graph, when the gradient of the outputs has arrived.

`Recompute` takes nothing but a phony from `CellNode`, so the engine may run it before the gradient is there. It hands
the phony on to the `CellNode` of the next micro-batch, so it runs after that `CellNode` has finished: no more than one
recomputed micro-batch is alive on a device. Where one thread runs all cells, the engine takes nodes in the reverse
order of their creation anyway, and nothing is gained by starting early. Then there is no `Recompute`, and `CellNode`
runs the cell again itself.

The parameters are no inputs of these nodes: their gradients go another way (see `gradients`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpipe.cell.layers_cell import LayersCell
from torchgpipe.devices.torch_internals import keeps_graph
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.graph.function import Function
from torchgpipe.graph.phony import get_phony

__all__ = ["CellNode", "Recompute"]


class CellNode(Function):
    """Forward: the cell; before its outputs a phony, where cells are tied to each other. Backward: that of the cell.

    Its arguments are the cell; whether it recomputes; the lane, a phony from the micro-batch before, or None; the phony
    of the gradients of parameters; and then the leaves.
    """

    @staticmethod
    def forward(ctx: Any, cell: LayersCell, recomputes: bool, _lane: Leaf, _gradients: Tensor, *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.cell, ctx.lane_device = cell, cell.column.lane_device
        outputs = cell.forward(leaves, recomputes=recomputes)
        if recomputes:
            ctx.save_for_backward(*leaves)
        frozen = [output for output, end in zip(outputs, cell.exports) if end is None and output is not None]
        if frozen:  # Else autograd would take all of them along.
            ctx.mark_non_differentiable(*frozen)
        return outputs if ctx.lane_device is None else (get_phony(ctx.lane_device), *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        _refuse_create_graph()
        cell: LayersCell = ctx.cell
        grads = grads if ctx.lane_device is None else grads[1:]
        _, _, needs_lane, _, *needed = ctx.needs_input_grad
        result: list[Leaf] = []
        again = cell.take_second_run()
        if any([grad is not None for grad in grads]):
            if cell.recomputes and again is None:
                again = cell.recompute(ctx.saved_tensors)
            result = cell.differentiate(grads, keep_graph=keeps_graph(), again=again)
        entered = iter(result)
        lane = get_phony(ctx.lane_device) if ctx.lane_device is not None and needs_lane else None
        return None, None, lane, None, *[next(entered, None) if need else None for need in needed]


class Recompute(Function):
    """Forward: nothing. Backward: the second run of the cell of the `CellNode` that made ``x``."""

    @staticmethod
    def forward(ctx: Any, node: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.node = node
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        _refuse_create_graph()
        ctx.node.cell.recompute_ahead(ctx.node.saved_tensors)
        return None, grad


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True cannot go through a checkpointed partition, whose graph is freed as soon as it "
            "has been differentiated; use checkpoint='never' for gradients of gradients, outside of record() and of "
            "torch.profiler"
        )
