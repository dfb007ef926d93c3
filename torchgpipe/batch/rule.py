"""How a number of the mini-batch, such as a loss, is made of those of micro-batches: their sum, or their weighted mean.

PyTorch's own losses say which. Other functions are taken for means, and proved; see `loss_proof`. The numbers that a
model returns are compared with those of all rows at once, on the sample.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.batch.given import to_floats

__all__ = ["Rule", "Shares", "rule_of"]

#: Their means count labels. All others are means over the rows, each of which has the same number of elements.
_OF_LABELS = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")


class Rule(NamedTuple):
    """How numbers of micro-batches are joined.

    Attributes:
        adds_up: whether the number of the mini-batch is their sum, and not their mean
        ignored: the label that a mean over labels leaves out; None for a mean over rows
        class_weights: the weight of each label in the mean
        shifts: whether the first label of each row is left out, as by a model that predicts the next ones
    """

    adds_up: bool = False
    ignored: int | None = None
    class_weights: Tensor | None = None
    shifts: bool = False

    def weights(self, labels: Sequence[Any], sizes: Sequence[int]) -> list[float]:
        """Return what the mean of each micro-batch counts. For labels on a device, the host waits once.

        Args:
            labels: the labels of each micro-batch, or anything else, of which the rows count
            sizes: the rows of each micro-batch
        """
        return to_floats([self._count(one, rows) for one, rows in zip(labels, sizes, strict=True)])

    def _count(self, labels: Any, rows: int) -> int | Tensor:
        is_counted = self.ignored is not None and isinstance(labels, Tensor) and labels.dim() > 0
        if not is_counted or labels.is_floating_point() or labels.is_complex():
            return rows
        if self.shifts and labels.dim() > 1:
            labels = labels[..., 1:]
        counts: Tensor = labels != self.ignored
        if self.class_weights is not None:
            counts = self.class_weights.to(labels.device)[labels.where(counts, 0)].where(counts, 0)
        return counts.sum()


class Shares:
    """The factor of each micro-batch in a number of the mini-batch.

    Args:
        weights: the weight of each micro-batch in the mean; None if numbers are added up

    Attributes:
        weights: see above
        total: the sum of all weights; set it to that in all replicas
    """

    def __init__(self, weights: Sequence[float] | None) -> None:
        self.weights, self.total = weights, float(sum(weights or ()))

    def of(self, i: int) -> float:
        """Return the factor of micro-batch ``i``; 0 for nothing of nothing."""
        return 1.0 if self.weights is None else self.weights[i] / (self.total or 1.0)

    def of_some(self, numbers: Sequence[int]) -> Shares:
        """Return the shares of some micro-batches in a number of these alone."""
        return Shares(None if self.weights is None else [self.weights[i] for i in numbers])

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """Return a number of the mini-batch, given those of the micro-batches."""
        parts = [value * self.of(i) for i, value in enumerate(values) if self.of(i)]  # A mean over no labels is nan.
        return torch.stack(parts).sum() if parts else values[0]


def rule_of(loss_fn: Callable[..., Any] | None) -> Rule | None:
    """Return what a loss function says: one of PyTorch, or `functools.partial` of one; None of any other.

    Raises:
        ValueError: it returns a loss for each row.
    """
    name, settings = _settings_of(loss_fn)
    reduction = settings.get("reduction")
    if reduction == "none":
        raise ValueError(
            "loss_fn has reduction='none', but must return one number for a micro-batch; give reduction='mean' or 'sum'"
        )
    is_deprecated = settings.get("size_average") is not None or settings.get("reduce") is not None
    if reduction not in ("mean", "sum", "batchmean") or is_deprecated:
        return None
    of_labels = (settings["ignore_index"], settings["weight"]) if name in _OF_LABELS else ()
    return Rule(reduction == "sum", *of_labels)


def _settings_of(loss_fn: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the settings of a loss of PyTorch."""
    if isinstance(loss_fn, nn.Module):
        forward = getattr(type(loss_fn), "forward", None)  # A scripted module has none.
        if getattr(forward, "__module__", None) != "torch.nn.modules.loss":
            return "", {}
        return type(loss_fn).forward.__qualname__.partition(".")[0], {**vars(loss_fn), **loss_fn._buffers}
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    if getattr(function, "__module__", None) != "torch.nn.functional":
        return "", {}
    try:
        call = inspect.signature(loss_fn).bind(None, None)  # an output and a target
    except (TypeError, ValueError):
        return "", {}
    call.apply_defaults()
    return getattr(function, "__name__", ""), call.arguments
