"""A table that compares what a pipeline has computed with what the plain model has computed.

The two do the same operations on the same micro-batches, so their results are equal but for the order in which
gradients are added up. So a difference may be a small multiple of the rounding error, relative to the largest number of
the tensor; gradients that are zero but for rounding, such as that of the bias of a key, are held against the largest
gradient of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Compared", "Comparison", "cotangent", "difference_of", "largest_of"]


class Compared(NamedTuple):
    """A row of the table.

    Attributes:
        name: what was compared
        plain: the norm of the plain model's, nan if there is none
        ours: the norm of the pipeline's, nan if there is none
        difference: the largest absolute difference of two elements
        fault: what is wrong and the next move; '' if the two are equal but for rounding
    """

    name: str
    plain: float
    ours: float
    difference: float
    fault: str


class Comparison:
    """What was compared, as a table that prints.

    Args:
        epsilon: the rounding error of the coarsest numbers in the model, relative to 1

    Attributes:
        rows: the rows of the table
    """

    def __init__(self, epsilon: float) -> None:
        self.rows: list[Compared] = []
        self._epsilon = epsilon
        #: How much two results may differ, relative to their largest number: by other roundings of sums, or by another
        #: order of the same sums.
        self.loose, self.tight = math.sqrt(epsilon), min(4096 * epsilon, math.sqrt(epsilon))

    @property
    def faults(self) -> list[str]:
        """What is wrong, in the order in which it was found."""
        return [row.fault for row in self.rows if row.fault]

    @property
    def is_equal(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def add(
        self, name: str, plain: Tensor | None, ours: Tensor | None, fault: str, *, tolerance: float, floor: float = 0.0
    ) -> bool:
        """Compare two tensors, and return whether they are equal but for rounding.

        Args:
            name: what they are
            plain: the plain model's; None for no gradient
            ours: the pipeline's; None for no gradient
            fault: what to say if they differ
            tolerance: how much they may differ, relative to the largest number of the two
            floor: a number that is held against differences, too, with the rounding error alone
        """
        difference, _ = difference_of(plain, ours)
        is_equal = self.are_equal(plain, ours, tolerance=tolerance, floor=floor)
        self.rows.append(Compared(name, _norm(plain), _norm(ours), difference, "" if is_equal else fault))
        return is_equal

    def are_equal(self, plain: Tensor | None, ours: Tensor | None, *, tolerance: float, floor: float = 0.0) -> bool:
        """Return whether two tensors are equal but for rounding, as `add` does, without a row.

        Args:
            plain: the plain model's; None for no gradient
            ours: the pipeline's; None for no gradient
            tolerance: how much they may differ, relative to the largest number of the two
            floor: a number that is held against differences, too, with the rounding error alone
        """
        difference, largest = difference_of(plain, ours)
        return difference <= tolerance * largest + 64 * self._epsilon * floor

    def note(self, name: str, fault: str) -> None:
        """Add a row for what could not be compared.

        Args:
            name: what it is
            fault: what is wrong and the next move
        """
        self.rows.append(Compared(name, math.nan, math.nan, math.nan, fault))

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows], default=4)
        lines = [f"{'':{width}}  {'plain':>12}  {'pipeline':>12}  {'difference':>12}"]
        for row in self.rows:
            numbers = "  ".join([f"{value:12.6g}" for value in row[1:4]])
            lines.append(f"{row.name:{width}}  {numbers}{'  differs' if row.fault else ''}")
        lines.append("\n".join(self.faults) or "equal, but for the order of sums")
        return "\n".join(lines)

    __repr__ = __str__


def difference_of(plain: Tensor | None, ours: Tensor | None) -> tuple[float, float]:
    """Return the largest absolute difference of two tensors, and the largest finite number in them.

    None stands for zeros. Tensors of different shapes differ infinitely, and so does nan from a number.
    """
    if plain is None or ours is None:
        one = plain if ours is None else ours
        largest = 0.0 if one is None else _largest(_dense(one))
        return largest, largest
    plain, ours = _dense(plain), _dense(ours)
    if plain.shape != ours.shape or plain.dtype != ours.dtype:
        return math.inf, max(_largest(plain), _largest(ours))
    ours = ours.to(plain.device)
    largest = max(_largest(plain), _largest(ours))
    unequal = ~((plain == ours) | (torch.isnan(plain) & torch.isnan(ours)))
    if not unequal.any():
        return 0.0, largest
    if plain.dtype == torch.bool:
        return 1.0, largest
    wide = torch.complex128 if plain.is_complex() else torch.float64
    difference = float((plain[unequal].to(wide) - ours[unequal].to(wide)).abs().max())
    return (math.inf if math.isnan(difference) else difference), largest


def largest_of(gradients: Iterable[Tensor | None]) -> float:
    """Return the largest absolute number in some gradients."""
    return max([_largest(_dense(grad)) for grad in gradients if grad is not None], default=0.0)


def cotangent(path: str, tensor: Tensor) -> Tensor:
    """Return a gradient for an output, the same for every run: random, so that no error cancels out."""
    generator = torch.Generator().manual_seed(len(path) + tensor.numel())
    real = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
    return real.to(tensor.dtype).to(tensor.device)


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _largest(tensor: Tensor) -> float:
    if not tensor.numel() or tensor.dtype == torch.bool:
        return float(tensor.any()) if tensor.numel() else 0.0
    magnitude = tensor.abs() if tensor.is_floating_point() or tensor.is_complex() else tensor.double().abs()
    return float(torch.where(torch.isfinite(magnitude), magnitude, 0.0).max())


def _norm(tensor: Tensor | None) -> float:
    if tensor is None:
        return math.nan
    dense = _dense(tensor)
    return float(torch.linalg.vector_norm(dense if dense.is_complex() else dense.double()))
