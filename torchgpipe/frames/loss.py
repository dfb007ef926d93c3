"""The loss of a mini-batch, and other tensors without dimensions, from those of its micro-batches.

A mean over tokens is the mean of the micro-batches' means, weighted with their tokens: with the number of labels that
are not -100. Where the caller gives ``num_items_in_batch``, each micro-batch has its share already, and shares add up.

Labels are counted before anything is launched, and where the caller has them: on the host, nobody waits for a device.
For labels on a device the host waits once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.frames.inputs import has_an_item_for_each, split_rows
from torchgpipe.frames.outputs import JoinScalar, are_equal, join, own_loss
from torchgpipe.frames.settings import Settings
from torchgpipe.frames.values import container, each, mapped
from torchgpipe.model.loss import called_with_target, numbers

__all__ = ["MicroBatchLoss", "mean_or_sum"]


def _count(labels: Any, ignored: int, rows: int, *, shifts: bool) -> int | Tensor:
    """Return the number of labels that count; that of the rows if there are no labels."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return rows
    if shifts and labels.dim() > 1:
        labels = labels[..., 1:]
    counted: Tensor = (labels != ignored).sum()
    return counted


def _weights(settings: Settings, named: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[float]:
    """Return the weights of micro-batches in a mean of what the model itself returns."""
    if settings.weight is not None and settings.loss_fn is None:
        return numbers([settings.weight(part) for part in named])
    name, ignored = settings.counted
    return numbers([_count(part.get(name), ignored, size, shifts=settings.shifts) for part, size in zip(named, sizes)])


def _weights_of_targets(settings: Settings, targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return the weights of micro-batches in a mean of what the loss function returns."""
    if settings.weight is not None:
        return numbers([called_with_target(settings.weight, target) for target in targets])
    ignored = getattr(settings.loss_fn, "ignore_index", -100)
    return numbers([_count(target, ignored, size, shifts=False) for target, size in zip(targets, sizes)])


def _adds_up(settings: Settings, named: Sequence[Mapping[str, Any]]) -> bool:
    if settings.reduce is not None:
        return settings.reduce == "sum"
    return settings.takes_items and named[0].get("num_items_in_batch") is not None


def mean_or_sum(settings: Settings, named: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> JoinScalar:
    """Return what joins tensors without dimensions; called before anything is launched."""
    adds_up = _adds_up(settings, named)
    own = settings.weight is not None and settings.loss_fn is None  # It may want labels that are not there.
    counted = None if adds_up or own else _weights(settings, named, sizes)

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
        weights = _weights(settings, named, sizes) if counted is None else counted
        total = sum(weights)
        shares = [value * (weight / total) for value, weight in zip(values, weights) if weight]
        return torch.stack(shares).sum() if shares else values[0]

    return joined


class MicroBatchLoss:
    """The loss of a step.

    Args:
        settings: the settings of the module
        named: the arguments of each micro-batch, by name
        sizes: the rows of each micro-batch
        target: the target of the mini-batch, for the loss function
        bring: brings a tensor of the target to where the loss is computed
        training: whether the model is in training
    """

    def __init__(
        self,
        settings: Settings,
        named: Sequence[Mapping[str, Any]],
        sizes: Sequence[int],
        target: Any,
        bring: Callable[[Tensor], Tensor],
        *,
        training: bool,
    ) -> None:
        self._loss_fn = settings.loss_fn
        self._coupled = [path for path, kind in settings.kinds[training].items() if kind == "coupled"]
        self._sizes = sizes
        given = _split(target, sizes)
        brought = mapped(target, bring)
        self._targets = given if brought is target else _split(brought, sizes)
        self._losses: dict[int, Tensor] = {}
        self._values: dict[int, Any] = {}
        if settings.reduce == "sum" or (self._loss_fn is None and _adds_up(settings, named)):
            self._shares = [1.0] * len(sizes)
            return
        if self._loss_fn is None:
            weights = _weights(settings, named, sizes)
        else:
            weights = _weights_of_targets(settings, given, sizes)
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
            loss = _nothing(output)
        # Of its own memory: some losses, as mse_loss, are computed in that of the output.
        self._losses[i] = loss.detach().reshape(()).clone()
        return loss, self._shares[i]

    def _loss_of(self, i: int, output: Any) -> Any:
        if self._loss_fn is not None:
            result = called_with_target(self._loss_fn, output, self._targets[i])
            if isinstance(result, tuple) and len(result) == 2:
                self._values[i] = result[1]
                return result[0]
            return result
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
        values = [self._values[i] for i in sorted(self._values)]
        if len(values) < len(self._sizes):
            raise ValueError(
                "loss_fn returned other values beside the loss for some micro-batches only; return them for all or none"
            )
        return total, join(values, self._sizes, {}, lambda _, numbers: torch.stack(list(numbers)))


def _nothing(output: Any) -> Tensor:
    """Return a loss of 0 with a graph."""
    parts = [tensor.reshape(-1)[:0].sum().real for _, tensor in each(output) if tensor.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def _split(target: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the target of each micro-batch: every tensor in it has the rows of the batch, and so may a list have."""
    rows = sum(sizes)
    if isinstance(target, Tensor):
        if not target.dim() or len(target) != rows:
            raise ValueError(
                f"the batch has {rows} rows in dimension 0, but the target is of shape {tuple(target.shape)}"
            )
        return split_rows(target, list(sizes))
    if has_an_item_for_each(target, rows):
        return split_rows(target, list(sizes))
    opened = container(target)
    if opened is None:
        return [target] * len(sizes)
    items = [_split(item, sizes) for item in opened.items]
    return [opened.rebuilt([parts[i] for parts in items]) for i in range(len(sizes))]
