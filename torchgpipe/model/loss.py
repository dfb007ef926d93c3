"""The loss of a mini-batch: the weighted mean of the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchgpipe.model.microbatch import Batch, rows_of, scatter

__all__ = ["LossFunction", "MeanLoss", "Weight"]

#: Takes the output and the target of a micro-batch, and returns its mean loss.
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
#: Takes the target of a micro-batch, and returns the weight of its mean loss.
Weight: TypeAlias = Callable[[Any], float | int | Tensor]


class MeanLoss:
    """The weighted mean of the losses of all micro-batches, in all replicas.

    Args:
        loss_fn: returns the mean loss of a micro-batch
        weight: returns the weight of that loss; None for the size of the micro-batch
        input: the input of the mini-batch
        target: the target of the mini-batch; None if the loss function needs none
        chunks: the number of micro-batches that a mini-batch is split into
        device: where the last partition computes

    Attributes:
        total: the weight of the targets of all replicas; to be set before the first micro-batch is finished
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        weight: Weight | None,
        input: Any,
        target: Any,
        chunks: int,
        device: torch.device,
    ) -> None:
        self._loss_fn, self._weight = loss_fn, weight
        self._target, self._chunks, self._device = target, chunks, device
        self._rows = rows_of(input)
        #: By micro-batch. A micro-batch whose last cell is recomputed is finished twice.
        self._losses: dict[int, Tensor] = {}
        self.total = 0.0

    def prepare(self, inputs: Sequence[Batch]) -> float:
        """Split the target like the input, and return its weight.

        Raises:
            ValueError: input and target have different sizes.
        """
        if self._target is None:
            self._targets = [Batch((None,)) for _ in inputs]
        else:
            self._targets = scatter((self._target,), self._chunks, self._device)
            rows = rows_of(self._target)
            if rows != self._rows:
                raise ValueError(
                    "input and target must have the same size in dimension 0, the batch, but have "
                    f"{self._rows} and {rows}"
                )
        sizes = [len(part) for part in torch.empty(self._rows, device="meta").chunk(self._chunks)]
        self._weights = [
            float(size if self._weight is None else self._weight(target.value))
            for size, target in zip(sizes, self._targets, strict=True)
        ]
        return sum(self._weights)

    def finish(self, i: int, output: Batch) -> Tensor:
        """Return the share of micro-batch ``i`` in the mean loss, of shape (1,)."""
        loss = self._share(output, self._targets[i], self._weights[i])
        self._losses[i] = loss.detach()
        return loss

    def sum(self) -> Tensor:
        """Return the sum of the shares, a tensor without dimensions; 0 in a process without the last partition."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for _, loss in sorted(self._losses.items()):
            total += loss.squeeze()
        return total

    def _share(self, output: Batch, target: Batch, weight: float) -> Tensor:
        if weight == 0:  # The mean loss of no targets may be nan. Backward needs a graph all the same.
            nothing = [leaf.reshape(-1)[:0].sum().real for leaf in output.leaves if leaf is not None]
            return sum(nothing, torch.zeros(1, device=self._device))
        loss = self._loss_fn(output.value, target.value)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"its shape is {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"it is {type(loss).__name__}"
            raise ValueError(f"loss_fn must return the mean loss of a micro-batch, a tensor of one number, but {got}")
        return loss.reshape(1) * (weight / self.total)
