"""The numbers that a model returns, such as its loss: how those of micro-batches make that of the mini-batch.

    labels     their mean, weighted with the labels that count
    shifted    the same without the first label of each row, which a model leaves out that predicts the next ones
    rows       their mean, weighted with the rows
    sum        their sum: each micro-batch has its share already

Which of these rules it is, no name tells for sure. So the plain model runs on rows together and on rows apart, with
labels that are uneven over rows: the rule is the one that gives the value and the gradient of rows together; see
`proof`. The caller's own weights, and those of `MicroBatches`, go before every rule. A model may divide by
``num_items_in_batch`` if it is given: with twice as many, the number is half of that. Then micro-batches add up.

Labels are counted before anything is launched, where the caller has them: labels on the host cost no wait. For labels
on a device the host waits once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from torchgpipe.batch.given import to_floats
from torchgpipe.batch.inputs import SplitBatch
from torchgpipe.batch.outputs import JoinScalar, are_equal
from torchgpipe.batch.rule import Rule, share_of
from torchgpipe.spine.settings import Settings

__all__ = ["compute_shares", "compute_weights", "find_rule", "joiner", "list_rules", "verify_seen"]

_SUM = Rule(adds_up=True)


def list_rules(settings: Settings, batch: SplitBatch, path: str) -> list[Rule]:
    """Return the rules that an output may follow, the likely ones first: one, if the caller or the sample tells it.

    Raises:
        ValueError: ``num_items_in_batch`` is given for some micro-batches, and not for others.
    """
    study, (_, ignored) = settings.study, settings.study.labels
    if settings.reduce == "sum":
        return [_SUM]
    if _are_weighed(settings):
        return [Rule()]
    says = [named.get("num_items_in_batch") is not None for named in batch.named]
    if any(says) and not all(says):
        raise ValueError(
            "num_items_in_batch is in some of the MicroBatches only, so some losses would be shares of the mini-batch, "
            "and others means; give it in all of them or in none"
        )
    # If the sample had no such number, the losses that transformers names divide by what they are given.
    if batch.carried is not None or (any(says) and study.divides.get(path, study.predicts_next)):
        return [_SUM]
    if path in study.rules:
        return [study.rules[path]]
    shifts = study.predicts_next
    means = [Rule(ignored=ignored, shifts=shifts), Rule(ignored=ignored, shifts=not shifts), Rule()]
    return means if settings.reduce == "mean" else [*means, _SUM]


def find_rule(settings: Settings, batch: SplitBatch, path: str) -> Rule:
    """Return the rule of an output: the one that the sample has shown, or else the usual one."""
    return list_rules(settings, batch, path)[0]


def _are_weighed(settings: Settings) -> bool:
    """Return whether the caller weighs the numbers that the model returns."""
    return settings.weight is not None and settings.loss_fn is None


def verify_seen(settings: Settings, batch: SplitBatch, path: str) -> None:
    """Check that the sample has shown how a number is made.

    Raises:
        ValueError: a mini-batch gives a number that the sample did not give, such as what a loss is divided by.
    """
    is_told = settings.reduce == "sum" or _are_weighed(settings) or batch.weights is not None
    if batch.new_numbers and len(batch.sizes) > 1 and not is_told:
        more = "" if batch.window is None else ", or give MicroBatches weights"
        raise ValueError(
            f"how the output '{path}' of micro-batches is joined may depend on {batch.new_numbers}, which the sample "
            "did not give; give pipelined a sample with it, or reduce='sum', if micro-batches are to be added up" + more
        )


def compute_shares(settings: Settings, batch: SplitBatch, rule: Rule) -> list[float]:
    """Return the factor of each micro-batch in a number of the mini-batch."""
    weights = compute_weights(settings, batch, rule)
    return [share_of(i, weights, sum(weights or ())) for i in range(len(batch.sizes))]


def compute_weights(settings: Settings, batch: SplitBatch, rule: Rule) -> list[float] | None:
    """Return the weight of each micro-batch in the mean of a number; None if such numbers are added up."""
    if batch.weights is not None:
        return batch.weights
    if rule.adds_up:
        return None
    if settings.weight is not None and settings.loss_fn is None:
        return to_floats([settings.weight(part) for part in batch.named])
    name, _ = settings.study.labels
    return rule.weights([batch.splitter.tensors(part).get(name) for part in batch.parts], batch.sizes)


def joiner(settings: Settings, batch: SplitBatch) -> JoinScalar:
    """Return what joins tensors without dimensions; called before anything is launched."""
    shares = cache(partial(compute_shares, settings, batch))
    # The caller's own weights may want labels that are not there, and are asked for a number only.
    for path in () if _are_weighed(settings) else ("", *settings.study.rules):
        shares(find_rule(settings, batch, path))

    def joined(path: str, values: Sequence[Tensor]) -> Tensor:
        if not values[0].is_floating_point() and not values[0].is_complex():
            if are_equal(values):
                return values[0]
            raise ValueError(
                f"the output '{path}' is a whole number that differs between micro-batches, and cannot be joined; use "
                "model.step, whose loss_fn gets the output of each micro-batch"
            )
        verify_seen(settings, batch, path)
        # A mean over no labels is nan.
        factors = shares(find_rule(settings, batch, path))
        parts = [value * factor for value, factor in zip(values, factors) if factor]
        return torch.stack(parts).sum() if parts else values[0]

    return joined
