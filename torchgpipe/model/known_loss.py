"""What a loss function says of itself: whether it is a sum, and what its mean counts.

PyTorch's own losses do. Other functions say nothing, so a step takes them for a mean over labels, and proves them; see
`loss_proof`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["KnownLoss", "known_loss"]

#: Their means count labels. All others are means over the rows, each of which has the same number of elements.
_OF_LABELS = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")


class KnownLoss(NamedTuple):
    """What a loss function says of itself, or is taken for.

    Attributes:
        is_known: whether it says so
        adds_up: whether it is the sum over all rows
        ignored: the label that its mean leaves out; None if the mean is one over rows
        class_weights: the weight of each label in the mean
    """

    is_known: bool
    adds_up: bool
    ignored: int | None
    class_weights: Tensor | None = None


def known_loss(loss_fn: Callable[..., Any] | None) -> KnownLoss:
    """Return what a loss function says: one of PyTorch, or `functools.partial` of one.

    Raises:
        ValueError: it returns a loss for each row.
    """
    name, settings = _settings_of(loss_fn)
    reduction, weight = settings.get("reduction"), settings.get("weight")
    if reduction == "none":
        raise ValueError(
            "loss_fn has reduction='none', but must return one number for a micro-batch; give reduction='mean' or 'sum'"
        )
    # What is not None is deprecated, or may have the shape of a mini-batch.
    is_plain = settings.get("size_average") is None and settings.get("reduce") is None
    if reduction not in ("mean", "sum", "batchmean") or not is_plain or (weight is not None and name not in _OF_LABELS):
        return KnownLoss(loss_fn is None, False, None if loss_fn is None else getattr(loss_fn, "ignore_index", -100))
    ignored = settings["ignore_index"] if name in _OF_LABELS else None
    return KnownLoss(True, reduction == "sum", ignored, weight)


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
