"""The proof of a loss function: what it gives for two micro-batches together, beside what it gives for each.

A step takes the losses of micro-batches for means, and weighs them with their labels or rows. Nothing in a function of
the user's says whether that is right. So the first step also calls copies of it, on two micro-batches, and on both as
one: more would keep the outputs of a whole mini-batch. While all micro-batches weigh the same, a wrong weight shows
nothing, so the first step in which they do not proves the function again.

A function may have state, such as a counter or a moving mean, which no further call may change. So each call is one of
a copy of its own, and all copies begin with the same state. `copy.deepcopy` takes a function for a constant. But a
function may keep something in a closure, or in a global of its module, so it is made anew, with copies of both.
Parameters of modules are not copied: a call changes none. What a copy cannot have is said in Limits.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import forward_hooks
from torchgpipe.replay.random import generator_states, restored_generators

__all__ = ["LossProof", "copied_loss"]


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


def copied_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy; modules in it have no hooks.

    Raises:
        Exception: an attribute or a closure cannot be copied, such as a tensor with a graph; a global is shared then.
    """
    memo: dict[int, Any] = {}
    made = _copied(loss_fn, memo)
    for module in [one for one in memo.values() if isinstance(one, nn.Module)]:
        for hooks in forward_hooks(module):
            hooks.clear()
    return made  # type: ignore[no-any-return]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a value, given copies by the ids of their originals, as `copy.deepcopy` has them."""
    if isinstance(value, partial):
        keywords = {name: _copied(item, memo) for name, item in value.keywords.items()}
        return partial(_copied(value.func, memo), *[_copied(item, memo) for item in value.args], **keywords)
    if isinstance(value, FunctionType):
        return memo.get(id(value)) or _copied_function(value, memo)
    owner = getattr(value, "__self__", value)  # of a method
    if isinstance(owner, nn.Module):
        memo.update({id(parameter): parameter for parameter in owner.parameters()})
    return copy.deepcopy(value, memo)


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    # Functions of one module share its globals, and functions made in one call their cells.
    own = function.__globals__
    known = memo.setdefault(id(own), dict(own))
    cells = tuple([_copied_cell(cell, memo) for cell in function.__closure__ or ()])
    made = memo[id(function)] = FunctionType(function.__code__, known, function.__name__, None, cells)
    settings = function.__defaults__, function.__kwdefaults__, function.__dict__
    made.__defaults__, made.__kwdefaults__, made.__dict__ = copy.deepcopy(settings, memo)
    for name in _names_in(function.__code__) & own.keys():
        # A function of another module, such as a library's, is shared, and so is what cannot be copied.
        if not isinstance(own[name], FunctionType) or own[name].__globals__ is own:
            with suppress(Exception):
                known[name] = _copied(own[name], memo)
    return made


def _copied_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    if id(cell) not in memo:
        made = memo[id(cell)] = CellType()  # First, as a function may be in a cell of its own.
        with suppress(ValueError):  # There is nothing in it yet.
            made.cell_contents = _copied(cell.cell_contents, memo)
    found: CellType = memo[id(cell)]
    return found


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code reads, functions within it included."""
    return {*code.co_names}.union(*[_names_in(one) for one in code.co_consts if isinstance(one, CodeType)])
