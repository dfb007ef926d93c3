"""The loss of a step, from those of its micro-batches; the model's own loss follows a rule of `numbers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.frames.inputs import SplitBatch
from torchgpipe.frames.numbers import compute_weights, find_rule, share, verify_seen
from torchgpipe.frames.outputs import OWN_LOSSES, Kinds, Rule, find_path_of_loss, join, own_loss
from torchgpipe.frames.settings import Settings
from torchgpipe.model.loss import NO_LOSS_FUNCTION, Losses
from torchgpipe.model.loss_proof import LossProof
from torchgpipe.model.values import each, mapped
from torchgpipe.processes.processes import Processes

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
        super().__init__(
            settings.loss_fn,
            settings.weight,
            settings.reduce,
            whole=settings.whole_target,
            to_device=to_device,
            kept=lambda values: mapped(values, Tensor.detach),
            proof=proof,
        )
        self._settings, self._batch = settings, batch
        self._kinds = settings.study.kinds[training]
        self._begin(target, batch.sizes, batch.window)
        #: By the path of the model's own loss, where a step may meet that, the factor of each micro-batch.
        self._own: dict[str, list[float]] = {}
        self._rules: dict[str, Rule] = {}
        if self._loss_fn is None or (target is None and self._weight is None):
            self._rules = {path: find_rule(settings, batch, path) for path in OWN_LOSSES}
        #: By the rule of a mean, the weights of the micro-batches.
        self._weights_of = {
            rule: weights
            for rule in sorted({*self._rules.values()})
            if (weights := compute_weights(settings, batch, rule)) is not None
        }
        self._share({rule: sum(weights) for rule, weights in self._weights_of.items()})

    def add_replicas(self, processes: Processes) -> None:
        """Let the loss be that of all replicas."""
        totals = torch.tensor([self.total, *map(sum, self._weights_of.values())], dtype=torch.float64)
        processes.add_replicas(totals, "the weight of the targets of the replicas")
        self.total, *rest = totals.tolist()
        self._share(dict(zip(self._weights_of, rest)))

    def _share(self, totals: Mapping[Rule, float]) -> None:
        shares = {rule: share(weights, totals[rule]) for rule, weights in self._weights_of.items()}
        self._own = {path: shares.get(rule, [1.0] * len(self._sizes)) for path, rule in self._rules.items()}

    def of(self, i: int, output: Any) -> tuple[Tensor, float]:
        """Return the loss of micro-batch ``i``, and its weight in the loss of the mini-batch.

        Raises:
            ValueError: there is no loss, or it is not a tensor of one number.
        """
        loss, factor = self._weigh(i, output)
        self._shares[i] = loss.detach() * factor
        return loss, factor

    def _list_weighed(self, targets: list[Any]) -> list[Any]:
        return self._batch.named if self._target is None else targets

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
        if self._own and loss is own_loss(output):
            self._pair, path = (), find_path_of_loss(output)  # The sample has shown what it is.
            verify_seen(self._settings, self._batch, path)
            return self._own[path][i]
        return super()._factor(i, output, loss)

    def result(self) -> Any:
        """Return the loss, and what else the loss function has returned, joined.

        Raises:
            TypeError, ValueError: other values cannot be joined, or the proof of the loss function fails.
        """
        sizes = self._sizes

        def together(outputs: list[Any], numbers: list[int]) -> Any:
            def scalar(path: str, values: Sequence[Tensor]) -> Tensor:
                factors = self._own.get(path, self._weights)
                own = [factors[i] for i in numbers]
                total = torch.stack([value * factor for value, factor in zip(values, own)]).sum()
                return total if self._rules.get(path) == "sum" else total / sum(own)

            return join(outputs, [sizes[i] for i in numbers], self._kinds, scalar)

        self.prove(together)
        if not self._values:
            return self.sum()
        values = self._values_of(len(sizes))
        if self._window is not None:
            return self.sum(), values
        # Along dimension 0, as a GPipe does: nothing tells whether the rows of a matrix are those of the batch.
        kinds: Kinds = {path: 0 for path, tensor in each(values[0]) if tensor.dim()}
        try:
            return self.sum(), join(values, sizes, kinds, lambda _, numbers: torch.stack(list(numbers)))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"what loss_fn returns beside the loss is joined along dimension 0, but "
                f"{str(error).partition(';')[0]}; return tensors, all but dimension 0 of one shape"
            ) from None
