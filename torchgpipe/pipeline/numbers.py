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

from torch import Tensor

from torchgpipe.batch.given import to_floats
from torchgpipe.batch.inputs import SplitBatch
from torchgpipe.batch.outputs import are_equal
from torchgpipe.batch.rule import Rule, Shares
from torchgpipe.spine.settings import Settings

__all__ = ["Numbers"]

_SUM = Rule(adds_up=True)


class Numbers:
    """The numbers that a model returns for a mini-batch.

    Args:
        settings: the settings of the module
        batch: the mini-batch
    """

    def __init__(self, settings: Settings, batch: SplitBatch) -> None:
        self._settings, self._batch = settings, batch
        #: Whether the caller weighs the numbers that the model returns.
        self._are_weighed = settings.weight is not None and settings.loss_fn is None
        self._known: dict[Rule, Shares] = {}

    def rules(self, path: str) -> list[Rule]:
        """Return the rules that a number may follow, the likely ones first: one, if the caller or the sample tells it.

        Raises:
            ValueError: ``num_items_in_batch`` is given for some micro-batches, and not for others.
        """
        study, (_, ignored) = self._settings.study, self._settings.study.labels
        if self._settings.reduce == "sum":
            return [_SUM]
        if self._are_weighed:
            return [Rule()]
        says = [named.get("num_items_in_batch") is not None for named in self._batch.named]
        if any(says) and not all(says):
            raise ValueError(
                "num_items_in_batch is in some of the MicroBatches only, so some losses would be shares of the "
                "mini-batch, and others means; give it in all of them or in none"
            )
        # If the sample had no such number, the losses that transformers names divide by what they are given.
        if self._batch.carried is not None or (any(says) and study.divides.get(path, study.predicts_next)):
            return [_SUM]
        if path in study.rules:
            return [study.rules[path]]
        shifts = study.predicts_next
        means = [Rule(ignored=ignored, shifts=shifts), Rule(ignored=ignored, shifts=not shifts), Rule()]
        return means if self._settings.reduce == "mean" else [*means, _SUM]

    def shares(self, rule: Rule) -> Shares:
        """Return the share of each micro-batch in a number that follows a rule."""
        if rule not in self._known:
            self._known[rule] = Shares(self._weights(rule))
        return self._known[rule]

    def _weights(self, rule: Rule) -> list[float] | None:
        batch = self._batch
        if batch.weights is not None:
            return batch.weights
        if rule.adds_up:
            return None
        if self._settings.weight is not None and self._are_weighed:
            return to_floats([self._settings.weight(part) for part in batch.named])
        name, _ = self._settings.study.labels
        return rule.weights([batch.splitter.tensors(part).get(name) for part in batch.parts], batch.sizes)

    def count(self) -> None:
        """Count what micro-batches weigh, before anything is launched."""
        # The caller's own weights may want labels that are not there, and are asked for a number only.
        for path in () if self._are_weighed else ("", *self._settings.study.rules):
            self.shares(self.rules(path)[0])

    def verify_seen(self, path: str) -> None:
        """Check that the sample has shown how a number is made.

        Raises:
            ValueError: a mini-batch gives a number that the sample did not give, such as what a loss is divided by.
        """
        batch = self._batch
        is_told = self._settings.reduce == "sum" or self._are_weighed or batch.weights is not None
        if batch.new_numbers and len(batch.sizes) > 1 and not is_told:
            more = "" if batch.window is None else ", or give MicroBatches weights"
            raise ValueError(
                f"how the output '{path}' of micro-batches is joined may depend on {batch.new_numbers}, which the "
                "sample did not give; give pipelined a sample with it, or reduce='sum', if micro-batches are to be "
                "added up" + more
            )

    def join(self, path: str, values: Sequence[Tensor]) -> Tensor:
        """Join tensors without dimensions; see `JoinScalar`."""
        if not values[0].is_floating_point() and not values[0].is_complex():
            if are_equal(values):
                return values[0]
            raise ValueError(
                f"the output '{path}' is a whole number that differs between micro-batches, and cannot be joined; use "
                "model.step, whose loss_fn gets the output of each micro-batch"
            )
        self.verify_seen(path)
        return self.shares(self.rules(path)[0]).join(values)
