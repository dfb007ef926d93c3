"""A table that compares what a pipeline has computed with what the plain model has computed.

On the same micro-batches the two launch the same kernels with the same shapes, so their results have the same bits, but
where a tensor has gradients from several partitions, which are added in another order. Then each gradient is compared
by the norm of the difference, relative to its own norm: a part of a gradient that is lost or reversed is noticed if it
has more than 1/16 of the norm in half precision, or 3e-5 in float32. A gradient that is zero but for rounding, such as
that of the bias of a key, may differ by its own rounding, which is measured where it matters; see
`torchgpipe.proof.proof`.

Rows together and rows apart have other shapes, and so other roundings: these may differ by the square root of the
rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpipe.model.fingerprint import Fingerprint, dense, have_same_bits, length

__all__ = ["Compared", "Comparison", "cotangent", "difference_of"]

#: The elements that are compared at a time on a CPU: too few for PyTorch to wake other threads for them.
_BLOCK = 1 << 14


class Compared(NamedTuple):
    """A row of the table.

    Attributes:
        name: what was compared
        plain: the norm of the plain model's, nan if there is none
        ours: the norm of the pipeline's, nan if there is none
        difference: the largest absolute difference of two elements; for gradients, the norm of the difference
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
        #: How much two results may differ, relative to their size: by other shapes, or by another order of sums.
        self.loose, self.tight = math.sqrt(epsilon), min(256 * epsilon, 1 / 16)
        #: What could not be compared, with the reason, and what may differ and does.
        self.told: list[str] = []

    @property
    def faults(self) -> list[str]:
        """What is wrong, in the order in which it was found."""
        return [row.fault for row in self.rows if row.fault]

    @property
    def is_equal(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def add(self, name: str, plain: Tensor | None, ours: Tensor | None, fault: str, *, tolerance: float) -> None:
        """Compare two tensors, and add the row.

        Args:
            name: what they are
            plain: the plain model's
            ours: the pipeline's
            fault: what to say if they differ
            tolerance: how much they may differ, relative to the largest number of the two
        """
        difference, largest, norm, other_norm = _measured(plain, ours)
        fault = "" if difference <= tolerance * largest else fault
        self.rows.append(Compared(name, norm, other_norm, difference, fault))

    def add_named(
        self, what: str, plain: Mapping[str, Tensor], ours: Mapping[str, Tensor], fault: str, tolerance: float
    ) -> None:
        """Compare tensors by their names, and add the rows.

        Args:
            what: what they are, with ``{}`` for the name
            plain: the plain model's, by name
            ours: the pipeline's, by name
            fault: what to say if they differ, with ``{}`` for the name
            tolerance: how much they may differ, relative to the largest number of the two
        """
        for name in dict.fromkeys([*plain, *ours]):
            row, text = what.replace("{}", name), fault.replace("{}", name)
            self.add(row, plain.get(name), ours.get(name), text, tolerance=tolerance)

    def skip(self, reason: str) -> None:
        """Note what is not compared.

        Args:
            reason: what it is, and why
        """
        self.tell(f"not compared: {reason}")

    def tell(self, message: str) -> None:
        """Note what the caller is warned of.

        Args:
            message: the warning
        """
        if message not in self.told:
            self.told.append(message)

    def add_gradient(
        self, name: str, plain: Fingerprint | None, ours: Fingerprint | None, fault: str, noise: Callable[[], float]
    ) -> None:
        """Compare two gradients, which may differ by the order of sums, and add the row.

        Args:
            name: what they are
            plain: the plain model's; None for no gradient
            ours: the pipeline's; None for no gradient
            fault: what to say if they differ
            noise: returns the norm of the rounding of the plain model's, which is measured only where it matters
        """
        a, b = (math.nan if one is None else one.norm for one in (plain, ours))
        if have_same_bits(plain, ours):
            self.rows.append(Compared(name, a, b, 0.0, ""))
            return
        known = [one for one in (plain, ours) if one is not None]
        nothing = (0.0,) * len(known[0].projections)
        difference = length(*[nothing if one is None else one.projections for one in (plain, ours)])
        near = self.tight * max([one.norm for one in known]) if len(known) == 2 else 0.0
        is_alike = len({one.bits[1:] for one in known}) == 1
        is_equal = is_alike and (difference <= near or difference <= near + 8 * noise())
        self.rows.append(Compared(name, a, b, difference, "" if is_equal else fault))

    def note(self, name: str, fault: str, plain: float = math.nan, ours: float = math.nan) -> None:
        """Add a row for a number that was compared, or for what could not be compared.

        Args:
            name: what it is
            fault: what is wrong and the next move; '' if nothing is
            plain: the plain model's number
            ours: the pipeline's number
        """
        self.rows.append(Compared(name, abs(plain), abs(ours), abs(plain - ours), fault))

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows], default=4)
        lines = [f"{'':{width}}  {'plain':>12}  {'pipeline':>12}  {'difference':>12}"]
        for row in self.rows:
            numbers = "  ".join([f"{value:12.6g}" for value in row[1:4]])
            lines.append(f"{row.name:{width}}  {numbers}{'  differs' if row.fault else ''}")
        lines += self.told
        lines.append("\n".join(self.faults) or "equal, but for the order of sums")
        return "\n".join(lines)

    __repr__ = __str__


def difference_of(plain: Tensor | None, ours: Tensor | None) -> tuple[float, float]:
    """Return the largest absolute difference of two tensors, and the largest finite number in them.

    None stands for zeros. Tensors of different shapes differ infinitely, and so does nan from a number.
    """
    return _measured(plain, ours)[:2]


def cotangent(path: str, tensor: Tensor) -> Tensor:
    """Return a gradient for an output, the same for every run: random, so that no error cancels out."""
    generator = torch.Generator().manual_seed(len(path) + tensor.numel())
    real = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
    return real.to(tensor.dtype).to(tensor.device)


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    """Split a tensor into blocks: what is computed with one stays in the cache, and takes no memory that counts."""
    flat = tensor.reshape(-1)
    size = _BLOCK if flat.device.type == "cpu" else 1024 * _BLOCK
    return torch.split(flat, size) if flat.numel() else ()


def _size_of(tensor: Tensor) -> tuple[float, float]:
    """Return the largest absolute finite number of a tensor, and its norm."""
    largest, squares = 0.0, 0.0
    for block in map(_wide, _blocks(tensor)):
        size, norm = (float(torch.linalg.vector_norm(block, p)) for p in (math.inf, 2))
        if not math.isfinite(size):
            size = float(torch.where(torch.isfinite(block), block, 0.0).abs().max())
        largest, squares = max(largest, size), squares + norm * norm
    return largest, math.sqrt(squares)


def _measured(plain: Tensor | None, ours: Tensor | None) -> tuple[float, float, float, float]:
    """Return the largest difference of two tensors, the largest finite number in them, and their norms."""
    known = [dense(one) for one in (plain, ours) if one is not None]
    a, b = known if len(known) == 2 else [known[0], known[0].new_zeros(()).expand(known[0].shape)]
    (largest, norm), (other_largest, other_norm) = _size_of(a), _size_of(b)
    is_alike = a.shape == b.shape and a.dtype == b.dtype
    gaps = [_gap(x, y) for x, y in zip(_blocks(a), _blocks(b.to(a.device)))] if is_alike else [math.inf]
    largest = max(largest, other_largest)
    if len(known) == 2:
        return max(gaps, default=0.0), largest, norm, other_norm
    return max(gaps, default=0.0), largest, *((norm, math.nan) if ours is None else (math.nan, norm))


def _wide(block: Tensor) -> Tensor:
    """Return a block as numbers that hold its differences and its norm."""
    precise = block.is_complex() or block.dtype in (torch.float32, torch.float64)
    return block if precise else block.to(torch.float64)


def _gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two blocks."""
    if torch.equal(a, b):
        return 0.0
    x, y = _wide(a), _wide(b)
    gap = float(torch.linalg.vector_norm(x - y, math.inf))
    if math.isfinite(gap):
        # float64 rounds large integers.
        return gap if gap or a.is_floating_point() or a.is_complex() else 1.0
    unequal = ~((x == y) | (torch.isnan(x) & torch.isnan(y)))
    gap = float((x - y)[unequal].abs().max()) if unequal.any() else 0.0
    return math.inf if math.isnan(gap) else gap
