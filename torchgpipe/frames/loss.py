"""The loss of a mini-batch, and other tensors without dimensions, from those of its micro-batches.

A mean over tokens is the mean of the micro-batches' means, weighted with their tokens: with the number of labels that
are not -100. Where the caller gives ``num_items_in_batch``, each micro-batch has its share already, and shares add up.

Labels are counted before anything is launched, and where the caller has them: on the host, nobody waits for a device.
For labels on a device the host waits once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.frames.inputs import SplitBatch
from torchgpipe.frames.outputs import JoinScalar, are_equal, join, own_loss
from torchgpipe.frames.settings import Settings
from torchgpipe.model.loss import Losses, counted
from torchgpipe.model.loss_proof import LossProof, numbers
from torchgpipe.model.values import mapped

__all__ = ["MicroBatchLoss", "mean_or_sum"]


def _weights(settings: Settings, batch: SplitBatch) -> list[float]:
    """Return the weights of micro-batches in a mean of what the model itself returns."""
    if settings.weight is not None and settings.loss_fn is None:
        return numbers([settings.weight(part) for part in batch.named])
    name, ignored = settings.study.counted
    shifts = settings.study.shifts
    return numbers(
        [counted(part.get(name), ignored, size, shifts=shifts) for part, size in zip(batch.named, batch.sizes)]
    )


def _adds_up(settings: Settings, batch: SplitBatch) -> bool:
    if settings.reduce is not None:
        return settings.reduce == "sum"
    return settings.study.takes_items and batch.named[0].get("num_items_in_batch") is not None


def mean_or_sum(settings: Settings, batch: SplitBatch) -> JoinScalar:
    """Return what joins tensors without dimensions; called before anything is launched."""
    adds_up = _adds_up(settings, batch)
    weighs_itself = settings.weight is not None and settings.loss_fn is None  # It may want labels that are not there.
    counted = None if adds_up or weighs_itself else _weights(settings, batch)

    def joined(path: str, values: Sequence[Tensor]) -> Tensor:
        if not values[0].is_floating_point() and not values[0].is_complex():
            if are_equal(values):
                return values[0]
            raise ValueError(
                f"the output '{path}' is a whole number that differs between micro-batches, and cannot be joined; use "
                "model.step, whose loss_fn gets the output of each micro-batch"
            )
        stacked = torch.stack(list(values))
        if adds_up:
            return stacked.sum()
        weights = _weights(settings, batch) if counted is None else counted
        total = sum(weights)
        shares = [value * (weight / total) for value, weight in zip(values, weights) if weight]
        return torch.stack(shares).sum() if shares else values[0]

    return joined


class MicroBatchLoss(Losses):
    """The loss of a step.

    Args:
        settings: the settings of the module
        batch: the micro-batches
        target: the target of the mini-batch, for the loss function
        bring: brings a tensor of the target to where the loss is computed
        training: whether the model is in training
        proof: what has been proved of the loss function; None to prove nothing
    """

    def __init__(
        self,
        settings: Settings,
        batch: SplitBatch,
        target: Any,
        bring: Callable[[Tensor], Tensor],
        *,
        training: bool,
        proof: LossProof | None = None,
    ) -> None:
        super().__init__(
            settings.loss_fn,
            settings.weight,
            settings.reduce,
            whole=settings.whole_target,
            bring=bring,
            kept=lambda values: mapped(values, Tensor.detach),
            proof=proof,
        )
        self._kinds, self._batch = settings.study.kinds[training], batch
        self._begin(target, batch.sizes)
        #: The weights of the model's own losses, where a step may meet these.
        self._own: list[float] = []
        if self._loss_fn is None or (target is None and self._weight is None):
            adds_up = _adds_up(settings, batch)
            weights = [1.0] * len(batch.sizes) if adds_up else _weights(settings, batch)
            total = 1.0 if adds_up else sum(weights) or 1.0
            self._own = [weight / total for weight in weights]

    def of(self, i: int, output: Any) -> tuple[Tensor, float]:
        """Return the loss of micro-batch ``i``, and its weight in the loss of the mini-batch.

        Raises:
            ValueError: there is no loss, or it is not a tensor of one number.
        """
        loss, factor = self._weighed(i, output)
        self._shares[i] = loss.detach() * factor
        return loss, factor

    def _weighed_by(self, targets: list[Any]) -> list[Any]:
        return self._batch.named if self._target is None else targets

    def _loss_of(self, i: int, output: Any) -> Any:
        if self._loss_fn is not None:
            return super()._loss_of(i, output)
        coupled = [path for path, kind in self._kinds.items() if kind == "coupled"]
        if coupled and len(self._sizes) > 1:
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
        if self._own and loss is own_loss(output):
            self._pair = ()  # The sample has shown what it is.
            return self._own[i]
        return super()._factor(i, output, loss)

    def result(self) -> Any:
        """Return the loss, and what else the loss function has returned, joined.

        Raises:
            ValueError: the proof of the loss function fails.
        """
        weights, sizes = self._own or self._weights, self._sizes

        def together(outputs: list[Any], numbers: list[int]) -> Any:
            own = [weights[i] for i in numbers]

            def scalar(_: str, values: Sequence[Tensor]) -> Tensor:
                return torch.stack([value * weight for value, weight in zip(values, own)]).sum() / sum(own)

            return join(outputs, [sizes[i] for i in numbers], self._kinds, scalar)

        self.prove(together)
        if not self._values:
            return self.sum()
        values = self._values_of(len(sizes))
        return self.sum(), join(values, sizes, {}, lambda _, numbers: torch.stack(list(numbers)))
