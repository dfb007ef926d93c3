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

from torchgpipe.frames.inputs import SplitBatch, has_an_item_for_each, split_rows
from torchgpipe.frames.outputs import JoinScalar, are_equal, join, own_loss
from torchgpipe.frames.settings import Settings
from torchgpipe.model.loss import Losses, counted, loss_weights, nothing, numbers
from torchgpipe.model.values import each, mapped, spread

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
    """

    def __init__(
        self,
        settings: Settings,
        batch: SplitBatch,
        target: Any,
        bring: Callable[[Tensor], Tensor],
        *,
        training: bool,
    ) -> None:
        super().__init__(settings.loss_fn, lambda values: mapped(values, Tensor.detach))
        self._coupled = [path for path, kind in settings.study.kinds[training].items() if kind == "coupled"]
        sizes = self._sizes = batch.sizes
        targets = _split(target, sizes)
        brought = mapped(target, bring)
        self._targets = targets if brought is target else _split(brought, sizes)
        if settings.reduce == "sum" or (self._loss_fn is None and _adds_up(settings, batch)):
            self._shares = [1.0] * len(sizes)
            return
        if self._loss_fn is None:
            weights = _weights(settings, batch)
        else:
            weights = loss_weights(settings.loss_fn, settings.weight, targets, sizes)
        total = sum(weights) or 1.0
        self._shares = [weight / total for weight in weights]

    def of(self, i: int, output: Any) -> tuple[Tensor, float]:
        """Return the loss of micro-batch ``i``, and its weight in the loss of the mini-batch.

        Raises:
            ValueError: there is no loss, or it is not a tensor of one number.
        """
        loss = self._loss_of(i, output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"the loss of a micro-batch must be a tensor of one number, such as its mean, but is {got}"
            )
        if not self._shares[i]:  # The mean over no labels is nan, and so would be its gradient.
            loss = nothing([tensor for _, tensor in each(output)])
        # Of its own memory: some losses, as mse_loss, are computed in that of the output.
        self._losses[i] = loss.detach().reshape(()).clone()
        return loss, self._shares[i]

    def _loss_of(self, i: int, output: Any) -> Any:
        if self._loss_fn is not None:
            return self._computed(i, output, self._targets[i])
        if self._coupled and len(self._sizes) > 1:
            raise ValueError(
                f"the output {self._coupled} couples the rows of a batch, so the loss of the mini-batch is not the "
                "mean of those of its micro-batches; give pipelined(..., loss_fn=...) what micro-batches should learn"
            )
        loss = own_loss(output)
        if loss is None:
            raise ValueError(
                f"a step needs a loss, but the output ({type(output).__name__}) has none; pass labels to step, or give "
                "pipelined(..., loss_fn=...)"
            )
        return loss

    def result(self) -> Any:
        """Return the loss, and what else the loss function has returned, joined."""
        total = torch.stack([self._losses[i] * self._shares[i] for i in sorted(self._losses)]).sum()
        if not self._values:
            return total
        values = self._values_of(len(self._sizes))
        return total, join(values, self._sizes, {}, lambda _, numbers: torch.stack(list(numbers)))


def _split(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the target of each micro-batch: every tensor in it has the rows of the batch, and so may a list have."""
    rows = sum(sizes)

    def divide(value: Any, _path: str) -> list[Any] | None:
        if isinstance(value, Tensor) and (not value.dim() or len(value) != rows):
            raise ValueError(
                f"the batch has {rows} rows in dimension 0, but the target is of shape {tuple(value.shape)}"
            )
        has_rows = isinstance(value, Tensor) or has_an_item_for_each(value, rows)
        return split_rows(value, list(sizes)) if has_rows else None

    return spread(target, divide, len(sizes))
