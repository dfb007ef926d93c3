"""A cell that tells a recorder what it does and when. It takes the place of a plain one only where somebody listens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.cell import Cell, Stage
from torchgpipe.function import Function
from torchgpipe.microbatch import Batch
from torchgpipe.timeline.record import Kind, Open, Step, WhatIsRecorded, recorded
from torchgpipe.typing import Leaf, Leaves

__all__ = ["RecordedCell"]


class RecordedCell(Cell):
    """See :class:`torchgpipe.cell.Cell`.

    Args:
        step: listens to the mini-batch
    """

    __slots__ = ("_backward", "_ends", "_step")

    def __init__(self, stage: Stage, i: int, m: int, checkpoint: bool, step: Step) -> None:
        super().__init__(stage, i, m, checkpoint)
        self._step = step
        self._backward: Open | None = None

    def first_run(self, leaves: Leaves) -> Leaves:
        with self._recorded("forward"):
            return super().first_run(leaves)

    def second_run(self, checkpoint: Any) -> None:
        with self._recorded("recomputation"):
            super().second_run(checkpoint)

    def _gradients(self, outputs: Leaves, grads: Leaves, wanted: list[Tensor]) -> Sequence[Tensor | None]:
        with self._recorded("backward"):
            return super()._gradients(outputs, grads, wanted)

    def call(self, batch: Batch) -> Batch:
        self._ends = _notice(batch, self._end_backward)
        with self._recorded("forward"):
            output = super().call(batch)
        _notice(output, self._begin_backward)
        return output

    # At backward of a cell that is not checkpointed the engine is on its own. It passes two nodes, on either side of
    # the layers. If the cell has no use for the gradient of its input, then the one that it passes last is missing: the
    # cell ends when something else begins in the same thread, or else with the whole backward pass.

    def _begin_backward(self) -> None:
        self._backward = Open(self._step, self._what("backward"), self._stage.stream, noticed=self._ends)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._backward.end)

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._backward.end()

    def _recorded(self, kind: Kind) -> AbstractContextManager[None]:
        return recorded(self._step, self._what(kind), self._stage.stream)

    def _what(self, kind: Kind) -> WhatIsRecorded:
        return WhatIsRecorded(kind, self._i, self._stage.j)


def _notice(batch: Batch, callback: Callable[[], None]) -> bool:
    """Calls back when the gradient of a batch goes by.

    Returns:
        whether one will
    """
    if not torch.is_grad_enabled() or not any([leaf is not None and leaf.requires_grad for leaf in batch.leaves]):
        return False
    if torch._C._are_functorch_transforms_active():  # They have an autograd of their own.
        return False
    batch.leaves = _Notice.apply(callback, *batch.leaves)
    return True


class _Notice(Function):
    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.callback = callback
        return tuple([None if leaf is None else leaf.detach() for leaf in leaves])

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        ctx.callback()
        return None, *grads
