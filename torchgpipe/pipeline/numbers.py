"""The numbers that a model returns, such as its loss: how those of micro-batches make that of the mini-batch.

    labels     their mean, weighted with the labels that count
    shifted    the same without the first label of each row, which a model leaves out that predicts the next ones
    rows       their mean, weighted with the rows
    sum        their sum: each micro-batch has its share already

Which of these rules it is, no name tells for sure. So the plain model runs on rows together and on rows apart, with
labels that are uneven over rows: the rule is the one that gives the value and the gradient of rows together; see
`front.rows`. The caller's own weights, and those of `MicroBatches`, go before every rule. A model may divide by
``num_items_in_batch`` if it is given: with twice as many, the number is half of that. Then micro-batches add up.

Labels are counted before anything is launched, where the caller has them: labels on the host cost no wait. For labels
on a device the host waits once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.batch.given import to_floats
from torchgpipe.batch.inputs import SplitBatch
from torchgpipe.batch.loss import NO_LOSS_FUNCTION, Losses
from torchgpipe.batch.loss_proof import LossProof
from torchgpipe.batch.outputs import are_equal, join, own_loss
from torchgpipe.batch.rule import Rule, Shares
from torchgpipe.processes.processes import Processes
from torchgpipe.spine.settings import Settings

__all__ = ["MicroBatchLoss", "Numbers"]

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


class MicroBatchLoss(Losses):
    """The loss of a step: that of a loss function, or the model's own, which is one of its numbers.

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
