"""The proof of a loss function: what it gives for two micro-batches together, beside what it gives for each.

A step takes the losses of micro-batches for means, and weighs them with their labels or rows. Nothing in a function of
the user's says whether that is right. So the first step calls it once more, on two micro-batches as one: more would
keep the outputs of a whole mini-batch. While all micro-batches weigh the same, a wrong weight shows nothing, so the
first step in which they do not proves the function again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.model.untouched import python_random_states
from torchgpipe.model.values import each
from torchgpipe.replay.random import generator_states, restored_generators

__all__ = ["Apart", "LossProof"]


class Apart(NamedTuple):
    """What a loss function has given for a micro-batch: its number, the output without a graph, and its weight."""

    loss: Tensor
    output: Any
    weight: float


class LossProof:
    """What has been proved of the loss function of a pipeline."""

    def __init__(self) -> None:
        #: For each proof, whether micro-batches weighed differently.
        self._proved: set[bool] = set()

    def pair(self, weights: Sequence[float], sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the two micro-batches to look at; none if there is nothing to prove.

        Args:
            weights: the weight of each micro-batch
            sizes: the rows of each micro-batch
        """
        if True in self._proved:
            return ()
        rates = {i: weight / size for i, (weight, size) in enumerate(zip(weights, sizes)) if weight and size}
        lowest, highest = min(rates, key=rates.__getitem__, default=0), max(rates, key=rates.__getitem__, default=0)
        if len(rates) < 2 or (rates[lowest] == rates[highest] and False in self._proved):
            return ()
        return (lowest, highest) if rates[lowest] != rates[highest] else tuple(rates)[:2]

    def compare(self, apart: Mapping[int, Apart], sizes: Sequence[int], call: Callable[[], Any]) -> None:
        """Compare the loss of two micro-batches together with the weighted mean of their losses.

        Args:
            apart: what the loss function has given for each of the two
            sizes: the rows of each micro-batch
            call: calls it on both as one micro-batch

        Raises:
            ValueError: the two differ.
        """
        (i, a), (j, b) = apart.items()
        devices = [a.loss.device]
        before, why = _random_states(devices), ""
        with torch.no_grad(), restored_generators(devices, []):
            try:
                whole = call()
            except Exception as error:
                whole, why = a.loss, f"on two micro-batches together it raises {type(error).__name__}: {error}"
            draws = _random_states(devices) != before
        together, first, second = map(float, (whole, a.loss, b.loss))
        mean = (first * a.weight + second * b.weight) / (a.weight + b.weight)
        floating = [tensor for _, tensor in each((a.loss, a.output)) if tensor.is_floating_point()]
        rounding = [torch.finfo(tensor.dtype).eps for tensor in floating]
        largest = max(abs(together), abs(first), abs(second))
        near = math.sqrt(max(rounding)) * largest
        counts_none = math.isnan(mean) and math.isfinite(together)  # Such as a mean over labels, all of them padding.
        if not counts_none and not 4 * rounding[0] < largest < math.inf:
            return  # Zero but for rounding, or not finite: the next step may show more.
        if not why and (counts_none or abs(together - mean) > near):
            if not draws:
                is_sum = abs(together - first - second) <= near
                raise ValueError(
                    f"loss_fn gives {together:.6g} for micro-batches {i} and {j} together, but for each of them "
                    f"{first:.6g} and {second:.6g}, whose mean, weighted {a.weight:g} to {b.weight:g}, is {mean:.6g}; "
                    + (_IT_IS_A_SUM if is_sum else _IT_IS_NO_MEAN)
                )
            why = "it draws random numbers"
        if why:
            warnings.warn(
                f"a step takes loss_fn for a mean over rows or labels, and cannot tell if it is, because {why}; give "
                "reduce='mean' or weight=, if the mean of what it gives for micro-batches is what to learn",
                UserWarning,
                stacklevel=2,
            )
        self._proved.add(a.weight * sizes[j] != b.weight * sizes[i])


_IT_IS_A_SUM = "it is a sum: give reduce='sum'"
_IT_IS_NO_MEAN = (
    "give weight=, which takes the target of a micro-batch and returns what its loss counts, such as tokens; or "
    "reduce='mean', if the mean of what it gives for micro-batches is what to learn"
)


def _random_states(devices: Sequence[torch.device]) -> Any:
    return generator_states(devices), python_random_states()
