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

Nothing is left behind: gradients of parameters go to stand-ins, those of other leaves are set aside (`leaves`), and
`untouched` puts back the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.typing import Leaf
from torchgpipe.model.comparison import Comparison, cotangent
from torchgpipe.model.fingerprint import Fingerprint, dense, fingerprint, length, weighted_sum
from torchgpipe.replay.ambient import Ambient

__all__ = [
    "OF_ROWS",
    "Expected",
    "Gradients",
    "Roots",
    "compare_gradients",
    "differentiate",
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


class Expected(NamedTuple):
    """The gradients of the plain model.

    Attributes:
        gradients: the gradients
        scaled: runs the plain model again, and returns its gradients of so many times the loss
    """

    gradients: Gradients
    scaled: Callable[[int], Gradients]

    def noise(self) -> dict[str, float]:
        """Return the norm of the rounding of each gradient."""
        noise: dict[str, float] = {}
        for scale in (3, 5):
            for name, scaled in self.scaled(scale).items():
                known = self.gradients.get(name)
                if known is not None and scaled is not None:
                    gap = length(known.projections, weighted_sum([(1 / scale, scaled)]))
                    noise[name] = max(noise.get(name, 0.0), gap)
        return noise


def compare_gradients(
    comparison: Comparison, expected: Expected, ours: Gradients, faults: Mapping[str, str], what: str = ""
) -> None:
    """Compare gradients of a pipeline with those of the plain model, and add the rows.

    Args:
        comparison: takes the rows
        expected: those of the plain model
        ours: those of the pipeline
        faults: what to say of each that differs
        what: what they are gradients of, for the rows
    """
    noise: dict[str, float] | None = None
    for name, grad in ours.items():
        plain = expected.gradients.get(name)
        # The plain model has no entry of a leaf outside of it that one micro-batch alone has used, or made.
        if name not in expected.gradients or (grad is None and plain is None):
            continue
        row = comparison.compare_gradients(f"gradient of {name}{what}", plain, grad, faults[name])
        if row.fault:
            noise = expected.noise() if noise is None else noise
            row = comparison.compare_gradients(row.name, plain, grad, faults[name], noise=noise.get(name, 0.0))
        comparison.rows.append(row)


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
