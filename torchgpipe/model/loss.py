"""The loss of a mini-batch: the weighted mean of the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchgpipe.model.microbatch import Batch, chunk_sizes, gather, rows_of, scatter

__all__ = [
    "NO_TARGET",
    "LossFunction",
    "Losses",
    "MeanLoss",
    "Weight",
    "called_with_target",
    "counted",
    "loss_weights",
    "nothing",
    "numbers",
]

#: Takes the output and the target of a micro-batch, and returns its mean loss, or a pair: the loss and other values.
LossFunction: TypeAlias = Callable[[Any, Any], Tensor | tuple[Tensor, Any]]
#: Takes the target of a micro-batch, and returns the weight of its mean loss.
Weight: TypeAlias = Callable[[Any], float | int | Tensor]

NO_TARGET = "no target was given: step(..., target=y)"


def called_with_target(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a loss function or a weight, whose last argument is the target; an error that its lack causes says so."""
    try:
        return function(*arguments)
    except (AttributeError, TypeError) as error:  # What None causes.
        if arguments[-1] is None:  # `step(x, y)` of a pipelined model gives y to the model.
            error.add_note(NO_TARGET)
        raise


def numbers(values: Sequence[float | int | Tensor]) -> list[float]:
    """Return numbers as floats. For tensors on an accelerator, the host waits once."""
    tensors = [value.detach() for value in values if isinstance(value, Tensor) and value.numel() == 1]
    if len(tensors) == len(values) and len({tensor.device for tensor in tensors}) == 1:
        return [float(number) for number in torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()]
    return [float(value) for value in values]


class Losses:
    """The losses of micro-batches, and what else the loss function has returned.

    Args:
        loss_fn: returns the mean loss of a micro-batch; None if its output has one
        kept: returns what to keep of other values that the loss function returns, without their graph; None if it must
            not return any
    """

    def __init__(self, loss_fn: Callable[..., Any] | None, kept: Callable[[Any], Any] | None) -> None:
        self._loss_fn, self._kept = loss_fn, kept
        #: By micro-batch. A micro-batch whose last cell is recomputed has its loss computed twice.
        self._losses: dict[int, Tensor] = {}
        self._values: dict[int, Any] = {}

    def _computed(self, i: int, output: Any, target: Any) -> Any:
        """Return the loss of micro-batch ``i``, and note other values."""
        assert self._loss_fn is not None
        result = called_with_target(self._loss_fn, output, target)
        if self._kept is None or not isinstance(result, tuple) or len(result) != 2:
            return result
        self._values[i] = self._kept(result[1])
        return result[0]

    @property
    def has_values(self) -> bool:
        """Whether the loss function has returned other values beside the loss."""
        return bool(self._values)

    def _values_of(self, count: int) -> list[Any]:
        """Return the other values of ``count`` micro-batches.

        Raises:
            ValueError: there are none for some of them.
        """
        if len(self._values) < count:
            raise ValueError(
                "loss_fn returned other values beside the loss for some micro-batches only; return them for all or none"
            )
        return [self._values[i] for i in sorted(self._values)]


def nothing(tensors: Iterable[Tensor]) -> Tensor:
    """Return a loss of 0 with a graph, in place of the mean over no targets, which is nan."""
    parts = [tensor.reshape(-1)[:0].sum().real for tensor in tensors if tensor.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def counted(labels: Any, ignored: int, rows: int, *, shifts: bool = False) -> int | Tensor:
    """Return the number of labels that count; that of the rows if there are no labels.

    Args:
        labels: the labels of a micro-batch, or anything else
        ignored: the label that a loss leaves out
        rows: the rows of the micro-batch
        shifts: whether the loss leaves out the first label of each row
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex() or labels.dim() == 0:
        return rows
    if shifts and labels.dim() > 1:
        labels = labels[..., 1:]
    count: Tensor = (labels != ignored).sum()
    return count


def loss_weights(
    loss_fn: Callable[..., Any] | None, weight: Weight | None, targets: Sequence[Any], sizes: Sequence[int]
) -> list[float]:
    """Return the weights of micro-batches in the mean of what a loss function returns.

    Args:
        loss_fn: the loss function; it leaves out its ``ignore_index``, or -100
        weight: the user's own weight
        targets: those of the micro-batches, where the caller has them: on the host, nobody waits for a device
        sizes: the rows of each micro-batch
    """
    if weight is not None:
        return numbers([called_with_target(weight, target) for target in targets])
    ignored = getattr(loss_fn, "ignore_index", -100)
    return numbers([counted(target, ignored, size) for target, size in zip(targets, sizes)])


class MeanLoss(Losses):
    """The weighted mean of the losses of all micro-batches, in all replicas.

    Args:
        loss_fn: returns the mean loss of a micro-batch
        weight: returns the weight of that loss; None for its labels that count, or its rows
        input: the input of the mini-batch
        target: the target of the mini-batch; None if the loss function needs none
        chunks: the number of micro-batches that a mini-batch is split into
        device: where the last partition computes
        takes_values: whether the loss function may return other values beside the loss

    Call `prepare`, set ``total``, `finish` each micro-batch, then read `sum` and `values`.

    Attributes:
        total: the weight of the targets of all replicas
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        weight: Weight | None,
        input: Any,
        target: Any,
        chunks: int,
        device: torch.device,
        *,
        takes_values: bool = False,
    ) -> None:
        super().__init__(loss_fn, _without_graph if takes_values else None)
        self._weight = weight
        self._target, self._chunks, self._device = target, chunks, device
        self._rows = rows_of(input)
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
        sizes = chunk_sizes(self._rows, self._chunks)
        given = self._targets if self._target is None else scatter((self._target,), self._chunks, None)
        self._weights = loss_weights(self._loss_fn, self._weight, [target.value for target in given], sizes)
        return sum(self._weights)

    def finish(self, i: int, output: Batch) -> Tensor:
        """Return the share of micro-batch ``i`` in the mean loss, of shape (1,)."""
        loss = self._computed(i, output.value, self._targets[i].value)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(self._says_what_is_wrong(loss))
        weight = self._weights[i]
        if weight:
            share = loss.reshape(1) * (weight / self.total)
        else:
            share = nothing([leaf for leaf in output.leaves if leaf is not None]).to(self._device).reshape(1)
        self._losses[i] = share.detach()
        return share

    def sum(self) -> Tensor:
        """Return the sum of the shares, a tensor without dimensions; 0 in a process without the last partition."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for _, loss in sorted(self._losses.items()):
            total += loss.squeeze()
        return total

    def values(self) -> Any:
        """Return the other values of all micro-batches, gathered along dimension 0; None if there are none.

        Raises:
            ValueError: the values of the micro-batches differ in structure.
        """
        if not self._values:
            return None
        return gather(self._values_of(len(self._weights)), "loss_fn")

    def _says_what_is_wrong(self, loss: Any) -> str:
        got = f"its shape is {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"it is {type(loss).__name__}"
        pair = ", or a pair of this loss and other values" if self._kept is not None else ""
        return f"loss_fn must return the mean loss of a micro-batch, a tensor of one number{pair}, but {got}"


def _without_graph(values: Any) -> Batch:
    batch = Batch.of(values, "what loss_fn returns beside the loss")
    leaves = [leaf if leaf is None else leaf.detach() for leaf in batch.leaves]
    # Of a number for each micro-batch, such as a count, a tensor of shape (micro-batches,) is gathered.
    return batch.replace(tuple([leaf.reshape(1) if leaf is not None and leaf.dim() == 0 else leaf for leaf in leaves]))
