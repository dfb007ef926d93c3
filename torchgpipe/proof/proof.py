"""The proof of a pipeline: what it computes on a mini-batch, beside what the plain model computes.

    rows together    the plain model, all rows at once              ─┐ equal but for rounding, with gradients of losses,
    rows apart       the plain model, micro-batch by micro-batch    ─┤ or rows are coupled, or split or joined wrongly
    pipeline         as it stands, micro-batch by micro-batch       ─┘ equal, or the cut has lost something

All of this runs in training as well as in evaluation, as far as it can. Rows together and apart draw other numbers, and
a batch norm couples them, so a model that draws or changes its buffers in training is compared by rows in evaluation
only. A pipelined model draws what the plain model draws, and is compared in training with all gradients.

A gradient is kept as a fingerprint, so that no more than the gradients of one run take memory. Two gradients of other
bits may differ by the order of sums. How much rounding makes of that in a tensor, the plain model tells: its gradients
of 3 and 5 times the loss, over 3 and 5, differ from those of the loss by rounding alone.

What the sample would hide is brought to light. Where no loss is known, the gradients of rows begin at the outputs, with
fixed random numbers. Parameters that are zero, as those of heads and gates that are to begin so, have other values
during a proof, or nothing behind them would show. What is nan in the plain model would be equal to any nan: it is an
error, or not compared.

Nothing is left behind: gradients of parameters go to aliases, or are set aside where layers are proved, as are those
of other leaves (`leaves`), and `untouched` puts back the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.typing import Leaf
from torchgpipe.model.comparison import Comparison, cotangent
from torchgpipe.model.fingerprint import Fingerprint, dense, fingerprint, length, weighted_sum
from torchgpipe.replay.ambient import Ambient

__all__ = [
    "OF_ROWS",
    "Gradients",
    "Roots",
    "Run",
    "compare_gradients",
    "differentiate",
    "differing_most",
    "has_nan",
    "nan_error",
    "take_fingerprints",
    "without_zeros",
]

#: The gradients of a run by the names of parameters; None for a parameter that has none.
Gradients = dict[str, Fingerprint | None]
#: Where backward begins, each tensor with its gradient.
Roots = list[tuple[Tensor, Tensor]]


OF_ROWS = (
    "the gradient of {} is not the sum of those of the rows apart, without a pipeline either: the rows are coupled, as "
    "by x.mean(0) or an attention over rows, and cannot be split; or a torch.autograd.Function adds a gradient that "
    "does not follow that of its output, which would count once for each micro-batch"
)


class Run(NamedTuple):
    """What a run has left.

    Attributes:
        outputs: the outputs, without a graph
        buffers: the buffers that have changed
        gradients: those of all micro-batches; none if the plain model cannot be differentiated
        draws: whether it has drawn random numbers
        loss: the loss of a step, if it is apart from the outputs
    """

    outputs: Any
    buffers: dict[str, Tensor]
    gradients: Gradients
    draws: bool
    loss: Tensor | None = None


def compare_gradients(
    comparison: Comparison,
    plain: Run,
    scaled: Callable[[int], Run],
    ours: Gradients,
    faults: Mapping[str, str],
    what: str = "",
) -> None:
    """Compare gradients of a pipeline with those of the plain model, and add the rows.

    Args:
        comparison: takes the rows
        plain: the run of the plain model
        scaled: runs the plain model again, with gradients of so many times the loss
        ours: those of the pipeline
        faults: what to say of each that differs
        what: what they are gradients of, for the rows
    """

    @cache
    def noise() -> dict[str, float]:
        """Return the norm of the rounding of each gradient."""
        found: dict[str, float] = {}
        for scale in (3, 5):
            for name, one in scaled(scale).gradients.items():
                known = plain.gradients.get(name)
                if known is not None and one is not None:
                    gap = length(known.projections, weighted_sum([(1 / scale, one)]))
                    found[name] = max(found.get(name, 0.0), gap)
        return found

    for name, grad in ours.items():
        # The plain model has no entry of a leaf outside of it that one micro-batch alone has used, or made.
        if name in plain.gradients and not (grad is plain.gradients[name] is None):
            rounding = lambda name=name: noise().get(name, 0.0)  # noqa: E731
            comparison.add_gradient(f"gradient of {name}{what}", plain.gradients[name], grad, faults[name], rounding)


def differing_most(together: Gradients, apart: Sequence[tuple[float, Gradients]], tolerance: float) -> str:
    """Return the name of the gradient of all rows that differs most from the sum of those of the rows apart.

    Args:
        together: the gradients of all rows
        apart: those of each micro-batch, with their factors
        tolerance: how much all gradients together may differ, relative to their size

    Returns:
        the name; '' if the gradients are equal but for rounding
    """
    gaps, sizes = dict[str, float](), list[float]()
    for name, whole in together.items():
        if all([name in gradients for _, gradients in apart]):  # Else a leaf outside that no run before had used.
            joined = weighted_sum([(factor, one) for factor, of_one in apart if (one := of_one[name]) is not None])
            known = weighted_sum([] if whole is None else [(1.0, whole)])
            gaps[name] = length(known, joined)
            sizes.append(max(length(joined), 0.0 if whole is None else whole.norm))
    is_equal = math.hypot(*gaps.values()) <= tolerance * math.hypot(*sizes)
    return "" if is_equal else max(gaps, key=gaps.__getitem__)


def differentiate(roots: Roots, *, keep_graph: bool = False) -> None:
    """Differentiate from roots; without autocast, as a pipeline does."""
    if roots:
        with Ambient().without_autocast():
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots], retain_graph=keep_graph)


@contextmanager
def without_zeros(module: nn.Module) -> Iterator[None]:
    """Give parameters that are zero other values in a ``with`` block, which are fixed, small and positive.

    Not a buffer, nor a tensor of a class of its own: what their zeros say is not known.
    """
    zeros = [
        (name, parameter.detach())
        for name, parameter in module.named_parameters()
        if type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.layout is torch.strided
        # Neither without values nor expanded.
        if not (parameter.is_meta or parameter.untyped_storage().nbytes() < parameter.nbytes or parameter.any())
    ]
    try:
        # In place, with a new version: copies of the weights elsewhere follow that.
        for name, zero in zeros:
            zero.copy_((cotangent(name, zero).abs() + 1) / 16)
        yield
    finally:
        for _, zero in zeros:
            zero.zero_()


def take_fingerprints(gradients: Iterable[tuple[str, Leaf]]) -> Gradients:
    """Return the fingerprints of gradients."""
    return {name: None if grad is None else fingerprint(grad) for name, grad in gradients}


def has_nan(tensor: Tensor) -> bool:
    """Return whether a tensor has nan."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not tensor.is_meta and bool(dense(tensor).isnan().any())


def nan_error(path: str, source: str = "") -> ValueError:
    """Return the error for an output of the plain model that has nan, which shows nothing."""
    return ValueError(
        f"the output '{path}' has nan in the plain model{source}: every nan is like another, so nothing would be "
        "compared; give a sample and weights that the model makes numbers of"
    )
