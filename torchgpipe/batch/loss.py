"""The loss of a step, from those of its micro-batches: their weighted mean, or their sum.

The mean of a mini-batch is the mean of the micro-batches' means, weighted with what these count: labels, or rows. What
PyTorch's own losses count is known; see `rule`. Nothing in any other function says whether it is a mean or a sum, so a
step takes it for a mean, and proves it; see `loss_proof`. ``reduce=`` or ``weight=`` says it without a proof.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchgpipe.batch.given import MicroBatches, to_floats
from torchgpipe.batch.loss_proof import LossProof, copied_loss
from torchgpipe.batch.microbatch import Batch, NoChunk, gather, has_an_item_for_each, split_rows
from torchgpipe.batch.rule import Rule, Shares, rule_of
from torchgpipe.devices.device import bring
from torchgpipe.model.values import copy_without_graph, each, mapped, spread

__all__ = ["NO_LOSS_FUNCTION", "NO_TARGET", "LossFunction", "Losses", "Weight", "verify_loss"]

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
    for name, function in (("loss_fn", loss_fn), ("weight", weight)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, such as torch.nn.functional.mse_loss, but got {function!r}")
    if reduce not in (None, "mean", "sum"):
        raise ValueError(f"reduce must be 'mean', 'sum' or None, but got {reduce!r}")
    if reduce == "sum" and weight is not None:
        raise ValueError(
            "reduce='sum' adds up the losses of micro-batches, so weight= has no use; leave one of them out"
        )
    rule_of(loss_fn)


class Losses:
    """The losses of the micro-batches of a step, what they weigh, and what else the loss function has returned.

    Args:
        loss_fn: returns the loss of a micro-batch; None if its output has one
        weight: returns the weight of a loss in the mean, given the target; None for the labels that count, or the rows
        reduce: ``'mean'`` or ``'sum'``: how losses are joined; None for what the loss function says, or else the mean
        target: the target of the mini-batch; None if the loss function needs none
        sizes: the rows of each micro-batch
        window: the micro-batches, if the caller gives them
        device: where the last partition computes
        to_device: copies a tensor of the target there
        whole: whether every micro-batch gets the whole target
        proof: what has been proved of the loss function; None to prove nothing
        weighed: what weights are made from, by micro-batch, if that is not the target

    Attributes:
        shares: the share of each micro-batch, by its target

    Raises:
        TypeError: the micro-batches of the input are given, and those of the target are not, or the reverse.
        ValueError: the target does not have the rows or the micro-batches of the batch, or weights have no use.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        weight: Weight | None,
        reduce: str | None,
        target: Any,
        sizes: Sequence[int],
        window: MicroBatches | None,
        device: torch.device,
        *,
        to_device: Callable[[Tensor], Tensor] | None = None,
        whole: bool = False,
        proof: LossProof | None = None,
        weighed: list[Any] | None = None,
    ) -> None:
        self._loss_fn, self._target, self._sizes, self._window = loss_fn, target, sizes, window
        self._device, self._to_device = device, to_device or functools.partial(bring, device=device)
        self._whole = whole or (len(sizes) == 1 and window is None) or isinstance(target, NoChunk)
        #: By micro-batch: the shares in the loss, and other values.
        self._losses: dict[int, Tensor] = {}
        self._values: dict[int, Any] = {}
        #: The micro-batches that the proof looks at, and their outputs.
        self._proof, self._pair = proof, tuple[int, ...]()
        self._outputs: dict[int, Any] = {}
        given = _given_weights(window, target, self._whole)
        if given is not None and (weight is not None or reduce == "sum"):
            other = "weight=" if weight is not None else "reduce='sum'"
            raise ValueError(f"MicroBatches has weights, which {other} leaves without use; leave one of them out")
        is_said = weight is not None or reduce is not None or given is not None
        each_one = [[i] for i in range(len(sizes))]
        self._targets = self._parts(each_one, self._to_device)
        known = rule_of(loss_fn)
        rule = known or Rule(ignored=getattr(loss_fn, "ignore_index", -100))
        # As the caller has them: the host does not wait for a device to count what is on the host.
        targets = self._parts(each_one, lambda tensor: tensor) if rule.ignored is not None or weight else self._targets
        weights = given  # None for a sum
        if given is None and weight is not None and loss_fn is not None:
            weights = to_floats([self._call_user(weight, part) for part in weighed or targets])
        elif given is None and (reduce == "mean" or (reduce is None and not rule.adds_up)):
            weights = (Rule() if self._whole else rule).weights(targets, sizes)
        self.shares = Shares(weights)
        # Micro-batches of a window that weigh the same are averaged, as in any loop that accumulates.
        is_average = window is not None and len({*(weights or ())}) == 1
        if proof is not None and loss_fn is not None and known is None and not is_said and not is_average:
            self._pair = proof.pair(weights or (), sizes)

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
            return [_join_parts([mapped(self._target[i], to_device) for i in pick]) for pick in picks]
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
            return [_join_parts([parts[i] for i in pick]) for pick in picks]

        return spread(self._target, divide, len(picks))

    def of(self, i: int, output: Any) -> tuple[Tensor, float]:
        """Return the loss of micro-batch ``i``, and its weight in the loss of the mini-batch.

        Raises:
            ValueError: there is no loss, or it is not a tensor of one number.
        """
        # A copy, as the loss function may change the output.
        kept = mapped(output, copy_without_graph, caches=True) if i in self._pair else None
        loss = self._loss_of(i, output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"its shape is {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"it is {type(loss).__name__}"
            raise ValueError(
                "the loss of a micro-batch must be a tensor of one number, such as its mean, or a pair of this loss "
                f"and other values, but {got}"
            )
        factor = self._factor(i, output, loss)
        if i in self._pair and loss.is_floating_point():
            self._outputs[i] = kept
        if not factor:  # The mean over no labels is nan, and so would be its gradient.
            loss = _make_zero_loss([tensor for _, tensor in each(output)])
        self._losses[i] = loss.detach().reshape(()).to(self._device) * factor
        return loss, factor

    def finish(self, i: int, output: Batch) -> Tensor:
        """Return the share of micro-batch ``i`` in the loss, of shape (1,)."""
        loss, factor = self.of(i, output.value)
        return loss.reshape(1).to(self._device) * factor

    def _loss_of(self, i: int, output: Any) -> Any:
        """Return what the loss function gives for micro-batch ``i``, and note other values."""
        assert self._loss_fn is not None
        result = self._call_user(self._loss_fn, output, self._targets[i])
        if not isinstance(result, tuple) or len(result) != 2:
            return result
        self._values[i] = mapped(result[1], Tensor.detach)
        return result[0]

    def _factor(self, i: int, output: Any, loss: Tensor) -> float:
        return self.shares.of(i)

    def _prove(self) -> None:
        """Prove the loss function, if this step has to, after the last micro-batch and before gradients are delivered.

        Raises:
            ValueError: its loss of two micro-batches together is not the mean of their losses.
        """
        outputs, self._outputs = dict(sorted(self._outputs.items())), {}
        if len(outputs) < 2 or self._proof is None:
            return

        def call(part: list[int]) -> Any:
            assert self._loss_fn is not None
            loss_fn, (target,) = copied_loss(self._loss_fn), self._parts([part], self._to_device)
            own = [mapped(outputs[i], Tensor.clone, caches=True) for i in part]
            result = self._call_user(loss_fn, self._joined(own, part) if len(own) > 1 else own[0], target)
            return result[0] if isinstance(result, tuple) else result

        weights, tensors = self.shares.weights or (), [tensor for _, tensor in each([*outputs.values()])]
        self._proof.compare(call, {i: weights[i] for i in outputs}, self._sizes, tensors)

    def _joined(self, outputs: list[Any], numbers: list[int]) -> Any:
        """Return the output of some micro-batches together, given those of each and their numbers."""
        return gather([Batch.of(output, "the last layer") for output in outputs], "loss_fn")

    def sum(self) -> Tensor:
        """Return the loss, a tensor without dimensions, added up as a loop over the micro-batches would."""
        return functools.reduce(torch.add, [share for _, share in sorted(self._losses.items())])

    def result(self) -> Any:
        """Return the loss, and what else the loss function has returned, gathered along dimension 0.

        If the caller gives the micro-batches, the latter is a list with the values of each.

        Raises:
            TypeError, ValueError: values cannot be gathered, or the proof of the loss function fails.
        """
        self._prove()
        if not self._values:
            return self.sum()
        values = [self._values.get(i) for i in range(len(self._sizes))]
        if self._window is not None:
            return self.sum(), values
        # A number of each becomes a tensor with one for each.
        source = "what loss_fn returns beside the loss"
        return self.sum(), gather([Batch.of(mapped(one, torch.atleast_1d), source) for one in values], "loss_fn")


def _join_parts(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else [item for part in parts for item in part]


def _make_zero_loss(tensors: Iterable[Tensor]) -> Tensor:
    """Return a loss of 0 with a graph, in place of the mean over no targets, which is nan."""
    parts = [tensor.reshape(-1)[:0].sum().real for tensor in tensors if tensor.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def _given_weights(window: MicroBatches | None, target: Any, whole: bool) -> list[float] | None:
    """Return the weights that the caller gives micro-batches, or None.

    Raises:
        TypeError: the micro-batches of the input are given, and those of the target are not, or the reverse.
        ValueError: there are not as many targets as micro-batches, or both have weights, which differ.
    """
    given = [one for one in (window, target) if isinstance(one, MicroBatches)]
    if len(given) == 1 and (window is None or not (target is None or whole)):
        raise TypeError(
            "of the input and the target, one alone is MicroBatches; give MicroBatches([...]) in both, and wrap in "
            "NoChunk what every micro-batch gets whole"
        )
    if len({*map(len, given)}) > 1:
        raise ValueError(f"there are {len(given[0])} MicroBatches in the input, but {len(given[1])} in the target")
    weights = [one.weights for one in given if one.weights is not None]
    if weights and weights[0] != weights[-1]:
        raise ValueError(
            f"the input has weights {weights[0]}, and the target {weights[-1]}; give them in one of the two"
        )
    return weights[0] if weights else None
