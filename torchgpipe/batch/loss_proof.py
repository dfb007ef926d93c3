"""The proof of a loss function: what it gives for two micro-batches together, beside what it gives for each.

A step takes the losses of micro-batches for means, and weighs them with their labels or rows. Nothing in a function of
the user's says whether that is right. So the first step also calls copies of it, on two micro-batches, and on both as
one: more would keep the outputs of a whole mini-batch. While all micro-batches weigh the same, a wrong weight shows
nothing, so the first step in which they do not proves the function again.

A function may have state, such as a counter or a moving mean, which no further call may change. So each call is one of
a copy of its own (`copied_loss`), and all copies begin with the same state. What a copy cannot have is said in Limits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchgpipe.replay.random import generator_states, restored_generators

__all__ = ["LossProof"]


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

    def compare(
        self,
        call: Callable[[list[int]], Tensor],
        weights: dict[int, float],
        sizes: Sequence[int],
        outputs: Sequence[Tensor],
    ) -> None:
        """Compare the loss of two micro-batches together with the weighted mean of their losses.

        Args:
            call: calls a copy of the loss function on some of the two micro-batches, as one
            weights: the weight of each of the two, by its number
            sizes: the rows of each micro-batch
            outputs: the tensors in the outputs

        Raises:
            ValueError: the two differ.
        """
        (i, of_i), (j, of_j) = weights.items()
        devices = [*dict.fromkeys([tensor.device for tensor in outputs])]
        before = generator_states(devices)
        losses, why = [], ""
        with torch.no_grad(), restored_generators(devices, []):
            try:
                losses = [call(part) for part in ([i], [j], [i, j])]
            except Exception as error:
                why = f"a copy of it, called on two micro-batches, raises {type(error).__name__}: {error}"
            draws = generator_states(devices) != before
        if losses:
            first, second, together = map(float, losses)
            mean = (first * of_i + second * of_j) / (of_i + of_j)
            rounding = [torch.finfo(one.dtype).eps for one in (losses[0], *outputs) if one.is_floating_point()]
            largest = max(abs(first), abs(second), abs(together))
            near = math.sqrt(max(rounding)) * largest
            counts_none = math.isnan(mean) and math.isfinite(together)  # As of labels that are all padding.
            if not counts_none and not 4 * rounding[0] < largest < math.inf:
                return  # Zero but for rounding, or not finite: the next step may show more.
            if counts_none or abs(together - mean) > near:
                if not draws:
                    is_sum = abs(together - first - second) <= near
                    raise ValueError(
                        f"loss_fn gives {together:.6g} for micro-batches {i} and {j} together, but for each of them "
                        f"{first:.6g} and {second:.6g}, whose mean, weighted {of_i:g} to {of_j:g}, is {mean:.6g}; "
                        + (_IT_IS_A_SUM if is_sum else _IT_IS_NO_MEAN)
                    )
                why = "it draws random numbers"
        if why:
            warnings.warn(
                f"a step takes loss_fn for a mean over rows or labels, and cannot tell if it is, because {why}; give "
                "reduce='mean' or weight=, if the mean of what it gives for micro-batches is what to learn, or "
                "reduce='sum' for a sum",
                UserWarning,
                stacklevel=2,
            )
        self._proved.add(of_i * sizes[j] != of_j * sizes[i])


_IT_IS_A_SUM = "it is a sum: give reduce='sum'"
_IT_IS_NO_MEAN = (
    "give weight=, which takes the target of a micro-batch and returns what its loss counts, such as tokens; or "
    "reduce='mean', if the mean of what it gives for micro-batches is what to learn"
)
