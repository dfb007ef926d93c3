"""A cell that tells a recorder what it does and when. It takes the place of a plain one only where somebody listens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchgpipe.devices.backward_pass import current_pass
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.cell import Cell, Stage
from torchgpipe.engine.dependency import fork
from torchgpipe.engine.record import Kind, Open, Step, begin
from torchgpipe.model.microbatch import Batch

__all__ = ["RecordedCell"]

Result = TypeVar("Result")


class RecordedCell(Cell):
    """See :class:`torchgpipe.engine.cell.Cell`.

    Args:
        step: listens to the mini-batch
    """

    __slots__ = ("_backward", "_ends", "_step")

    def __init__(self, stage: Stage, i: int, m: int, checkpoint: bool, keep: bool, step: Step) -> None:
        super().__init__(stage, i, m, checkpoint, keep)
        self._step = step
        self._backward: Open | None = None

    def first_run(self, leaves: Leaves) -> Leaves:
        return self._record("forward", super().first_run, leaves)

    def only_run(self, leaves: Leaves) -> Leaves:
        return self._record("forward", super().only_run, leaves)

    def second_run(self, checkpoint: Any) -> None:
        self._record("recomputation", super().second_run, checkpoint)

    def _gradients(self, *args: Any) -> Sequence[Tensor | None]:
        return self._record("backward", super()._gradients, *args)

    def _record(self, kind: Kind, run: Callable[..., Result], *args: Any) -> Result:
        # Without a context manager, which would cost as much again as all that is told here.
        stage = self._stage
        end = begin(self._step, kind, self._i, stage.j, None, stage.stream)
        try:
            result = run(*args)
        except BaseException:
            end(True)
            raise
        end(False)
        return result

    # At backward of a cell that is not checkpointed the engine is on its own. Hooks are called before the node of an
    # output runs, and that of an input. Where one thread has made all nodes, the engine takes one cell after
    # another, and a cell ends where the next begins. Else it may take nodes of two cells in turns, but each has a node
    # of its own at the input.

    def call(self, batch: Batch) -> Batch:
        # Transforms of torch.func have an autograd of their own.
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return self._record("forward", super().call, batch)
        self._ends = self._notice_end(batch)
        inputs = batch.leaves
        output = self._record("forward", super().call, batch)
        output.leaves = tuple([self._notice_begin(leaf, inputs) for leaf in output.leaves])
        return output

    def _notice_end(self, batch: Batch) -> bool:
        """Whether a node is there to end the cell at."""
        between_threads = self._stage.phony is not None
        if self._stage.j > 0 and not between_threads:
            return False
        for k, leaf in enumerate(batch.leaves):
            if leaf is not None and leaf.requires_grad:
                if self._i == 0 or not between_threads:  # Else the lane has made one.
                    leaf, _ = fork(leaf)
                    batch.leaves = (*batch.leaves[:k], leaf, *batch.leaves[k + 1 :])
                _before_node_of(leaf, self._end_backward)
                return True
        return False

    def _notice_begin(self, output: Leaf, inputs: Leaves) -> Leaf:
        if output is None or not output.requires_grad:
            return output
        if output.grad_fn is None or any([output is leaf for leaf in inputs]):
            output, _ = fork(output)  # No node of this cell has made it.
        if self._m > 1:
            _before_node_of(output, self._begin_backward)
        else:  # The caller's. To ask for its gradient is not to run the cell backward.
            output.grad_fn.register_prehook(self._begin_backward)  # type: ignore[union-attr]
        return output

    def _begin_backward(self, _: Any) -> None:
        if self._backward is None or self._backward.task != current_pass():  # the first of several outputs
            self._backward = Open(self._step, self._i, self._stage.j, self._stage.stream, noticed=self._ends)

    def _end_backward(self, _: Any) -> None:
        if self._backward is not None:
            self._backward.end()


def _before_node_of(tensor: Tensor, call: Callable[[Any], None]) -> None:
    """Lets the engine call when the gradient of a tensor is there, and so before it runs the node that has made it."""
    if tensor._backward_hooks is None:
        # What `register_hook` comes to, without a handle to take the hook away again, which costs as much as all of it.
        tensor._backward_hooks = OrderedDict({0: call})
        tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
        tensor._backward_hooks = None  # The node has it. What the layers have made stays as it is.
    else:
        tensor.register_hook(call)  # type: ignore[no-untyped-call]
