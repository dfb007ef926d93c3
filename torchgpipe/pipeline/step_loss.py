"""The loss of a step, from those of its micro-batches; the model's own loss follows a rule of `numbers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.batch.inputs import SplitBatch
from torchgpipe.batch.loss import NO_LOSS_FUNCTION, Losses
from torchgpipe.batch.loss_proof import LossProof
from torchgpipe.batch.outputs import join, own_loss
from torchgpipe.pipeline.numbers import Numbers
from torchgpipe.processes.processes import Processes
from torchgpipe.spine.settings import Settings

__all__ = ["MicroBatchLoss"]


class MicroBatchLoss(Losses):
    """The loss of a step.

    Args:
        settings: the settings of the module
        batch: the micro-batches
        target: the target of the mini-batch, for the loss function
        to_device: copies a tensor of the target to where the loss is computed
        training: whether the model is in training
        proof: what has been proved of the loss function; None to prove nothing
    """

    def __init__(
        self,
        settings: Settings,
        batch: SplitBatch,
        target: Any,
        to_device: Callable[[Tensor], Tensor],
        *,
        training: bool,
        proof: LossProof | None = None,
    ) -> None:
        if target is not None and settings.loss_fn is None:
            raise ValueError(NO_LOSS_FUNCTION)
        given = target is not None
        super().__init__(
            settings.loss_fn,
            settings.weight,
            settings.reduce,
            target,
            batch.sizes,
            batch.window,
            settings.devices[-1],
            to_device=to_device,
            whole=settings.whole_target,
            proof=proof,
            weighed=None if given else batch.named,
        )
        self._batch, self._numbers = batch, Numbers(settings, batch)
        self._kinds = settings.study.kinds[training]
        #: The model's own loss, where a step may meet it: its path, and the share of each micro-batch.
        self._path, self._own = "", self.shares
        if settings.loss_fn is None or (not given and settings.weight is None):
            self._path = settings.study.path_of_loss
            self._own = self._numbers.shares(self._numbers.rules(self._path)[0])

    def add_replicas(self, processes: Processes) -> None:
        """Let the loss be that of all replicas."""
        totals = torch.tensor([self.shares.total, self._own.total], dtype=torch.float64)
        processes.add_replicas(totals, "the weight of the targets of the replicas")
        self.shares.total, self._own.total = totals.tolist()

    def _loss_of(self, i: int, output: Any) -> Any:
        if self._loss_fn is not None:
            return super()._loss_of(i, output)
        coupled = [path for path, kind in self._kinds.items() if kind == "coupled"]
        if coupled and len(self._sizes) > 1 and not self._batch.given:
            raise ValueError(
                f"the output {coupled} couples the rows of a batch, so the loss of the mini-batch is not the "
                "mean of those of its micro-batches; give pipelined(..., loss_fn=...) what micro-batches should learn"
            )
        loss = own_loss(output)
        if loss is None:
            raise ValueError(
                f"a step needs a loss, but the output ({type(output).__name__}) has none; pass labels to step, or give "
                "pipelined(..., loss_fn=...)"
            )
        return loss

    def _factor(self, i: int, output: Any, loss: Tensor) -> float:
        if self._path and loss is own_loss(output):
            self._numbers.verify_seen(self._path)
            self._pair = ()  # The sample has shown what it is.
            return self._own.of(i)
        return super()._factor(i, output, loss)

    def _joined(self, outputs: list[Any], numbers: list[int]) -> Any:
        def scalar(path: str, values: Sequence[Tensor]) -> Tensor:
            return (self._own if path == self._path else self.shares).of_some(numbers).join(values)

        return join(outputs, [self._sizes[i] for i in numbers], self._kinds, scalar)
