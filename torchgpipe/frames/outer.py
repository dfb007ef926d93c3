"""The one autograd node that stands for a mini-batch in the caller's graph.

Its outputs are those of all micro-batches, its inputs are the parameters that are trained and the inputs that require
grad. So autograd itself adds to ``.grad``, calls hooks once, and serves ``torch.autograd.grad``; and the caller's graph
and those of the cells are apart, which may be differentiated in other threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import keeps_graph
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.aliases import Aliases
from torchgpipe.engine.function import Function
from torchgpipe.frames.cell import Export
from torchgpipe.frames.mini_batch import MiniBatch

__all__ = ["Outer"]


class Outer(Function):
    """Forward: the outputs, now a part of the caller's graph. Backward: the backward half of the mini-batch.

    Its arguments are the mini-batch, its aliases, the parameters that get a gradient, the exports of the outputs, the
    outputs, these parameters once more, and the inputs that require grad.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mini_batch: MiniBatch,
        aliases: Aliases,
        trained: Sequence[Tensor],
        exports: Sequence[Export],
        *tensors: Tensor,
    ) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.mini_batch, ctx.aliases, ctx.trained, ctx.exports = mini_batch, aliases, trained, exports
        return tuple([tensor.detach() for tensor in tensors[: len(exports)]])

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True cannot go through a pipelined model; leave it out, or use model.unpipelined()"
            )
        keep = keeps_graph()
        mini_batch: MiniBatch | None = ctx.mini_batch
        if mini_batch is None:
            raise RuntimeError(
                "the graph of this pipelined model has been differentiated and freed; give retain_graph=True to the "
                "backward before, or run the model again"
            )
        if not keep:
            ctx.mini_batch = None
        try:
            for export, grad in zip(ctx.exports, grads):
                export.add(grad)
            mini_batch.run_backward_half(keep_graph=keep)
        except BaseException:
            ctx.mini_batch = None  # A part of its graph is used up.
            ctx.aliases.take()
            raise
        inputs = [grad for _, grad in mini_batch.take_input_gradients()]
        sums = dict(zip(ctx.aliases.trained, ctx.aliases.take()))
        return (None, None, None, None, *[None] * len(grads), *[sums[one] for one in ctx.trained], *inputs)
