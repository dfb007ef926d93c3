"""The loss of a step, from those of its micro-batches: their weighted mean, or their sum.

The mean of a mini-batch is the mean of the micro-batches' means, weighted with what these count: labels, or rows. What
PyTorch's own losses count is known (`known_loss`); any other function has to prove itself (`loss_proof`), unless
``weight=`` or ``reduce=`` say what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchgpipe.devices.device import bring
from torchgpipe.model.given import MicroBatches, to_floats
from torchgpipe.model.known_loss import known_loss
from torchgpipe.model.loss_proof import LossProof
from torchgpipe.model.microbatch import (
    Batch,
    NoChunk,
    gather,
    has_an_item_for_each,
    sizes_of,
    split_rows,
    values_of,
    window_of,
)
from torchgpipe.model.settings import verify_functions
from torchgpipe.model.values import copy_without_graph, each, mapped, spread

__all__ = [
    "NO_LOSS_FUNCTION",
    "NO_TARGET",
    "LossFunction",
    "Losses",
    "MeanLoss",
    "Weight",
    "count_labels",
    "make_zero_loss",
    "verify_loss",
]

#: Takes the output and the target of a micro-batch, and returns its loss, or a pair: the loss and other values.
LossFunction: TypeAlias = Callable[[Any, Any], Tensor | tuple[Tensor, Any]]
#: Takes the target of a micro-batch, and returns the weight of its loss in the mean.
Weight: TypeAlias = Callable[[Any], float | int | Tensor]

NO_LOSS_FUNCTION = "target= is for a loss function, but there is none; give loss_fn=, or leave target out"
NO_TARGET = "no target was given: step(..., target=y)"


def verify_loss(loss_fn: Any, weight: Any, reduce: Any) -> None:
    """Check what a pipeline is told of the loss of a step.

    Raises:
        TypeError: a function is something else.
        ValueError: ``reduce`` has another value, it leaves ``weight`` without use, or there is a loss for each row.
    """
    verify_functions(loss_fn=loss_fn, weight=weight)
    if reduce not in (None, "mean", "sum"):
        raise ValueError(f"reduce must be 'mean', 'sum' or None, but got {reduce!r}")
    if reduce == "sum" and weight is not None:
        raise ValueError(
            "reduce='sum' adds up the losses of micro-batches, so weight= has no use; leave one of them out"
        )
    known_loss(loss_fn)


class Losses:
    """The losses of the micro-batches of a step, what they weigh, and what else the loss function has returned.

    Args:
        loss_fn: returns the loss of a micro-batch; None if its output has one
        weight: returns the weight of a loss in the mean, given the target; None for the labels that count, or the rows
        reduce: ``'mean'`` or ``'sum'``: how losses are joined; None for what the loss function says, or else the mean
        whole: whether every micro-batch gets the whole target
        to_device: copies a tensor of the target to where the loss is computed
        kept: returns what to keep of other values that the loss function returns, without their graph; None if it must
            not return any
        proof: what has been proved of the loss function; None to prove nothing

    Attributes:
        total: the weight of all targets, in all replicas
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        weight: Weight | None,
        reduce: str | None,
        *,
        whole: bool,
        to_device: Callable[[Tensor], Tensor],
        kept: Callable[[Any], Any] | None,
        proof: LossProof | None,
    ) -> None:
        self._loss_fn, self._weight, self._reduce = loss_fn, weight, reduce
        self._whole, self._to_device, self._kept, self._proof = whole, to_device, kept, proof
        self.total = 0.0
        #: By micro-batch: the shares in the loss, and other values.
        self._shares: dict[int, Tensor] = {}
        self._values: dict[int, Any] = {}
        #: The micro-batches that the proof looks at, and their outputs.
        self._pair: tuple[int, ...] = ()
        self._outputs: dict[int, Any] = {}

    def _begin(self, target: Any, sizes: Sequence[int], window: MicroBatches | None) -> None:
        """Split the target, and weigh the micro-batches, before anything is launched.

        Args:
            target: the target of the mini-batch
            sizes: the rows of each micro-batch
            window: the micro-batches, if the caller gives them

        Raises:
            TypeError: the micro-batches of the input are given, and those of the target are not, or the reverse.
            ValueError: the target does not have the rows or the micro-batches of the batch, or weights have no use.
        """
        self._target, self._sizes, self._window = target, sizes, window
        self._whole |= (len(sizes) == 1 and window is None) or isinstance(target, NoChunk)
        given = _given_weights(window, target, self._whole)
        if given is not None and (self._weight is not None or self._reduce == "sum"):
            other = "weight=" if self._weight is not None else "reduce='sum'"
            raise ValueError(f"MicroBatches has weights, which {other} leaves without use; leave one of them out")
        self._is_said = self._weight is not None or self._reduce is not None or given is not None
        each_one = [[i] for i in range(len(sizes))]
        self._targets = self._parts(each_one, self._to_device)
        is_known, adds_up, ignored, class_weights = known_loss(self._loss_fn)
        self._adds_up = self._reduce == "sum" or (adds_up and not self._is_said)
        # As the caller has them: the host does not wait for a device to count what is on the host.
        targets = self._parts(each_one, lambda tensor: tensor) if ignored is not None or self._weight else self._targets
        if given is not None:
            self._weights = given
        elif self._weight is not None and self._loss_fn is not None:
            self._weights = to_floats([self._call_user(self._weight, it) for it in self._list_weighed(targets)])
        elif self._whole:
            self._weights = [float(size) for size in sizes]
        else:
            self._weights = to_floats(
                [count_labels(it, ignored, size, class_weights) for it, size in zip(targets, sizes)]
            )
        # Micro-batches of a window that weigh the same are averaged, as in any loop that accumulates.
        is_mean = is_known or self._is_said or (window is not None and len({*self._weights}) == 1)
        if self._proof is not None and not is_mean:
            self._pair = self._proof.pair(self._weights, sizes)
        self.total = sum(self._weights)

    def _list_weighed(self, targets: list[Any]) -> list[Any]:
        """Return what the user's weight of each micro-batch is made from: its target."""
        return targets

    def _call_user(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the loss function or the weight; an error that the lack of a target causes says so."""
        try:
            return function(*arguments)
        except (AttributeError, TypeError) as error:
            if self._target is None:  # `step(x, y)` of a pipelined model gives y to the model.
                error.add_note(NO_TARGET)
            raise

    def _parts(self, picks: Sequence[Sequence[int]], to_device: Callable[[Tensor], Tensor]) -> list[Any]:
        """Return parts of the target, given for each the micro-batches that it belongs to."""
        if isinstance(self._target, MicroBatches):
            parts = [mapped(self._target[i], to_device) for pick in picks for i in pick]
            return [_join_parts(parts) if len(pick) > 1 else part for pick, part in zip(picks, parts)]
        sizes, rows, whole = list(self._sizes), sum(self._sizes), self._whole

        def divide(value: Any, _path: str) -> list[Any] | None:
            is_tensor = isinstance(value, Tensor)
            if isinstance(value, NoChunk) or (whole and is_tensor):
                return [to_device(value if is_tensor else value.tensor)] * len(picks)
            if whole or not (is_tensor or has_an_item_for_each(value, rows)):
                return None
            if is_tensor and (not value.dim() or len(value) != rows):
                raise ValueError(
                    f"the batch has {rows} rows in dimension 0, but the target is of shape {tuple(value.shape)}; wrap "
                    "in NoChunk what every micro-batch gets whole, or give GPipe or pipelined no_chunk=['target']"
                )
            parts = split_rows(mapped(value, to_device), sizes)
            return [parts[pick[0]] if len(pick) == 1 else _join_parts([parts[i] for i in pick]) for pick in picks]

        return spread(self._target, divide, len(picks))

    def _weigh(self, i: int, output: Any) -> tuple[Tensor, float]:
        """Return the loss of micro-batch ``i``, and what to multiply it by.

        Raises:
            ValueError: the loss is not a tensor of one number.
        """
        # A copy, as the loss function may change the output.
        kept = mapped(output, copy_without_graph, caches=True) if i in self._pair else None
        loss = self._loss_of(i, output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"its shape is {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"it is {type(loss).__name__}"
            pair = ", or a pair of this loss and other values" if self._kept is not None else ""
            raise ValueError(
                f"the loss of a micro-batch must be a tensor of one number, such as its mean{pair}, but {got}"
            )
        factor = self._factor(i, output, loss)
        if i in self._pair and loss.is_floating_point():
            self._outputs[i] = kept
        # The mean over no labels is nan, and so would be its gradient.
        return (loss if factor else make_zero_loss([tensor for _, tensor in each(output)])), factor

    def _loss_of(self, i: int, output: Any) -> Any:
        """Return what the loss function gives for micro-batch ``i``, and note other values."""
        assert self._loss_fn is not None
        result = self._call_user(self._loss_fn, output, self._targets[i])
        if self._kept is None or not isinstance(result, tuple) or len(result) != 2:
            return result
        self._values[i] = self._kept(result[1])
        return result[0]

    def _factor(self, i: int, output: Any, loss: Tensor) -> float:
        if self._adds_up:
            return 1.0
        return self._weights[i] / self.total if self._weights[i] else 0.0

    def prove(self, join: Callable[[list[Any], list[int]], Any]) -> None:
        """Prove the loss function, if this step has to, after the last micro-batch and before gradients are delivered.

        Args:
            join: joins the outputs of micro-batches, given these and their numbers

        Raises:
            ValueError: its loss of two micro-batches together is not the mean of their losses.
        """
        outputs, self._outputs = dict(sorted(self._outputs.items())), {}
        if len(outputs) < 2 or self._proof is None:
            return

        def call(loss_fn: Callable[..., Any], part: list[int]) -> Any:
            own = [mapped(outputs[i], Tensor.clone, caches=True) for i in part]
            (target,) = self._parts([part], self._to_device)
            result = self._call_user(loss_fn, join(own, part) if len(own) > 1 else own[0], target)
            return result[0] if isinstance(result, tuple) else result

        assert self._loss_fn is not None
        weights, tensors = {i: self._weights[i] for i in outputs}, [tensor for _, tensor in each([*outputs.values()])]
        self._proof.compare(self._loss_fn, call, weights, self._sizes, tensors)

    def sum(self) -> Tensor:
        """Return the loss, a tensor without dimensions, added up as a loop over the micro-batches would."""
        return functools.reduce(torch.add, [share.reshape(()) for _, share in sorted(self._shares.items())])

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


def _join_parts(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) else [item for part in parts for item in part]


def make_zero_loss(tensors: Iterable[Tensor]) -> Tensor:
    """Return a loss of 0 with a graph, in place of the mean over no targets, which is nan."""
    parts = [tensor.reshape(-1)[:0].sum().real for tensor in tensors if tensor.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def _given_weights(window: MicroBatches | None, target: Any, whole: bool) -> list[float] | None:
    """Return the weights that the caller gives micro-batches, or None.

    Raises:
        TypeError: the micro-batches of the input are given, and those of the target are not, or the reverse.
        ValueError: there are not as many targets as micro-batches, or both have weights, which differ.
    """
    targets = target if isinstance(target, MicroBatches) else None
    if window is None and targets is not None:
        raise TypeError("target is MicroBatches, but the input is not; give MicroBatches in both")
    if window is not None and targets is None and target is not None and not whole:
        raise TypeError(
            "the input is MicroBatches, but target is not; give MicroBatches([target_1, ...]), and wrap in NoChunk "
            "what every micro-batch gets whole"
        )
    if window is not None and targets is not None and len(targets) != len(window):
        raise ValueError(f"there are {len(window)} MicroBatches in the input, but {len(targets)} in the target")
    given = [known.weights for known in (window, targets) if known is not None and known.weights is not None]
    if given and given[0] != given[-1]:
        raise ValueError(f"the input has weights {given[0]}, and the target {given[-1]}; give them in one of the two")
    return given[0] if given else None


def count_labels(
    labels: Any, ignored: int | None, rows: int, class_weights: Tensor | None = None, *, shifts: bool = False
) -> int | Tensor:
    """Return the number of labels that count, or their weight; the number of rows if there are no labels.

    Args:
        labels: the labels of a micro-batch, or anything else
        ignored: the label that a loss leaves out; None if it counts rows
        rows: the rows of the micro-batch
        class_weights: the weight of each label
        shifts: whether the loss leaves out the first label of each row
    """
    if (
        ignored is None
        or not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dim() == 0
    ):
        return rows
    if shifts and labels.dim() > 1:
        labels = labels[..., 1:]
    counts = labels != ignored
    if class_weights is not None:
        counts = class_weights.to(labels.device)[labels.where(counts, 0)].where(counts, 0)
    count: Tensor = counts.sum()
    return count


class MeanLoss(Losses):
    """The loss of a step of a Sequential, in all replicas.

    Args:
        loss_fn: as for `Losses`
        weight: as for `Losses`
        input: the input of the mini-batch
        target: the target of the mini-batch; None if the loss function needs none
        chunks: the number of micro-batches that a mini-batch is split into
        device: where the last partition computes
        reduce: as for `Losses`
        whole: as for `Losses`
        takes_values: whether the loss function may return other values beside the loss
        proof: as for `Losses`

    Call `prepare`, set ``total``, `finish` each micro-batch, then read `values` and `sum`.
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
        reduce: str | None = None,
        whole: bool = False,
        takes_values: bool = False,
        proof: LossProof | None = None,
    ) -> None:
        kept = _without_graph if takes_values else None
        to = functools.partial(bring, device=device)
        super().__init__(loss_fn, weight, reduce, whole=whole, to_device=to, kept=kept, proof=proof)
        self._given = target, sizes_of(input, chunks), window_of(input)
        self._device = device

    def prepare(self, inputs: Sequence[Batch]) -> float:
        """Split the target like the input, and return its weight.

        Raises:
            TypeError: the input is `MicroBatches`, and the target is not.
            ValueError: input and target have different sizes.
        """
        self._begin(*self._given)
        return self.total

    def finish(self, i: int, output: Batch) -> Tensor:
        """Return the share of micro-batch ``i`` in the loss, of shape (1,)."""
        loss, factor = self._weigh(i, output.value)
        share = loss.reshape(1).to(self._device) * factor
        self._shares[i] = share.detach()
        return share

    def sum(self) -> Tensor:
        """Return the loss, a tensor without dimensions; 0 in a process without the last partition."""
        return super().sum() if self._shares else torch.zeros((), device=self._device)

    def values(self) -> Any:
        """Return the other values of all micro-batches, gathered along dimension 0; None if there are none.

        If the caller gives the micro-batches, that is a list with those of each.

        Raises:
            ValueError: the values of the micro-batches differ in structure, or the proof of the loss function fails.
        """
        self.prove(lambda outputs, _: gather([Batch.of(output, "the last layer") for output in outputs]))
        if not self._values:
            return None
        values = self._values_of(len(self._sizes))
        return gather(list(map(_with_rows, values)), "loss_fn") if self._window is None else values_of(values)


def _without_graph(values: Any) -> Batch:
    batch = Batch.of(values, "what loss_fn returns beside the loss")
    return batch.replace(tuple([leaf if leaf is None else leaf.detach() for leaf in batch.leaves]))


def _with_rows(batch: Batch) -> Batch:
    """Return the values of a micro-batch, of which a number becomes a tensor of shape (1,), to be gathered."""
    return batch.replace(tuple([leaf if leaf is None or leaf.dim() else leaf.reshape(1) for leaf in batch.leaves]))
