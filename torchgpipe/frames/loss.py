"""The loss of a step, from those of its micro-batches; the model's own loss follows a rule of `numbers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.frames.inputs import SplitBatch, has_an_item_for_each, split_rows
from torchgpipe.frames.numbers import rule_of, shares
from torchgpipe.frames.outputs import join, own_loss
from torchgpipe.frames.settings import Settings
from torchgpipe.model.loss import Losses, loss_weights, nothing
from torchgpipe.model.values import each, mapped, spread

__all__ = ["MicroBatchLoss"]


class MicroBatchLoss(Losses):
    """The loss of a step.

    Args:
        settings: the settings of the module
        batch: the micro-batches
        target: the target of the mini-batch, for the loss function
        bring: brings a tensor of the target to where the loss is computed
        training: whether the model is in training

    Attributes:
        shares: the factor of each micro-batch in the loss of the mini-batch
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
        if self._loss_fn is None:
            self.shares = shares(settings, batch, rule_of(settings, batch, "loss"))
        elif settings.reduce == "sum":
            self.shares = [1.0] * len(sizes)
        else:
            weights = loss_weights(settings.loss_fn, settings.weight, targets, sizes)
            total = sum(weights) or 1.0
            self.shares = [weight / total for weight in weights]

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
        if not self.shares[i]:  # The mean over no labels is nan, and so would be its gradient.
            loss = nothing([tensor for _, tensor in each(output)])
        # Of its own memory: some losses, as mse_loss, are computed in that of the output.
        self._losses[i] = loss.detach().reshape(()).clone()
        return loss, self.shares[i]

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
        total = torch.stack([self._losses[i] * self.shares[i] for i in sorted(self._losses)]).sum()
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
