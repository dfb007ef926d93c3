"""Compare what the two runs of a layer return: at first always, and then ever more rarely.

A layer may compute with what nobody gives back to it: a number outside of all layers, or Python's random numbers. Then
its second run returns something else. So two sums of each output are noted at the first run, and compared after the
second, for which the host waits. Some layers do so later on only, as after a warm-up. So for each number of inputs and
of their dimensions, the first `_ALWAYS` runs are compared, and then one whenever their number has doubled.

The sums may differ a little, where kernels add in any order, or the compiler has made two graphs. Such errors are a few
eps of single elements, in either direction. So they move a sum by a few eps of the tensor's norm, and `_EPS` of these
are tolerated, beside the rounding of the sums themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

__all__ = ["counts_of", "difference_of", "is_compared", "sums"]

_EPS = 64

#: An output may take most of the memory, so it is widened in pieces of so many elements; if there would be more pieces
#: than this, which each take some launches, the pieces are larger.
_PIECE, _MOST = 1 << 14, 1 << 10

#: The first runs of a structure that are all compared; later ones at each doubling.
_ALWAYS = 8

_counts: WeakKeyDictionary[nn.Module, dict[Hashable, int]] = WeakKeyDictionary()


def counts_of(module: nn.Module) -> dict[Hashable, int]:
    """Return how often a module has run, by the structure of its inputs, to be counted on."""
    return _counts.setdefault(module, {})


def is_compared(counts: dict[Hashable, int], structure: Hashable) -> bool:
    """Count a run, and return whether it is to be compared."""
    count = counts[structure] = counts.get(structure, 0) + 1
    return count <= _ALWAYS or count & (count - 1) == 0


def difference_of(before: Sequence[Tensor | None], outputs: Iterable[Tensor | None]) -> str | None:
    """Return what is in the place of the outputs of a first run, or None if nothing differs.

    Args:
        before: the sums of the outputs of the first run
        outputs: the outputs of the second
    """
    for k, (noted, output) in enumerate(zip(before, outputs)):
        found = sums(output)
        if noted is not None and found is not None and output is not None:
            (*firsts, norm), (*seconds, _) = noted.tolist(), found.tolist()
            tolerance = _EPS * (torch.finfo(output.dtype).eps * norm + torch.finfo(found.dtype).eps * firsts[1])
            for first, second in zip(firsts, seconds):
                if abs(first - second) > tolerance:
                    sums_differ = f"has the weighted sum {second:.6g} instead of {first:.6g}"
                    return f"output {k}, of shape {tuple(output.shape)}, {sums_differ}"
    return None


def sums(output: Tensor | None) -> Tensor | None:
    """Return a sum and a sum of absolute values, both with weights that tell elements apart, and the norm."""
    if output is None or output.layout is not torch.strided or not (output.is_floating_point() or output.is_complex()):
        return None
    with torch.no_grad():
        values = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
        wide = torch.float64 if values.dtype is torch.float64 else torch.float32
        total, begin = max(values.numel(), 1), 0
        size = min(total, max(_PIECE, total // _MOST))
        weights = torch.linspace(0.5, 1, size, device=values.device, dtype=wide)
        # Added up in place: small results between the pieces would keep the memory of all of them in the heap.
        totals = torch.zeros(3, device=values.device, dtype=wide)
        for piece in _pieces(values, size):
            piece = piece.to(wide)
            weighted = piece.dot(weights[: len(piece)]) * (1 + begin / total)
            totals += torch.stack([weighted, torch.linalg.vector_norm(piece, 1), piece.dot(piece)])
            begin += len(piece)
        totals[2].sqrt_()
        return totals


def _pieces(values: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the elements in vectors of at most ``size``: of a transposed tensor, each is a copy."""
    if values.numel() <= size:
        yield values.reshape(-1)
        return
    rows = size // (values.numel() // len(values))
    for part in torch.split(values, rows or 1):
        yield from _pieces(part if rows else part.squeeze(0), size)
