"""Fingerprints of gradients: what a proof keeps of a gradient whose memory is needed for the next one.

A proof compares the gradients of several runs of a model that may fill all memory. So of each gradient it keeps a few
numbers: a hash of the bits, the norm, and projections on random vectors. Two gradients of equal bits have equal
fingerprints. If two differ, the projections of the difference tell its norm: the mean of their squares has the square
of the norm as its expectation. Projections are linear, so those of a weighted sum are known without the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Fingerprint", "Projections", "combined", "dense", "fingerprint", "have_same_bits", "length", "weighted_sum"]

#: The elements that each have a random vector of their own; the blocks of a tensor differ by signs.
_BLOCK = 1 << 14
#: The blocks that are widened at a time.
_ROWS = 64
#: The number of projections. The estimate of a norm is within a factor of 2, but for one in a million.
_COUNT = 16

#: The projections of a tensor, or of a sum of tensors.
Projections = tuple[float, ...]


class Fingerprint(NamedTuple):
    """What is kept of a tensor.

    Attributes:
        bits: a hash of its elements, its type and its shape
        norm: its norm
        projections: its products with random vectors
    """

    bits: tuple[int, torch.dtype, torch.Size]
    norm: float
    projections: Projections


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor. The host waits for it."""
    tensor = dense(tensor)
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
    bits = int(torch.hash_tensor(flat.view(torch.uint8) if flat.itemsize == 1 else flat).item()) if flat.numel() else 0
    wide = flat.dtype if flat.dtype in (torch.float32, torch.float64) else torch.float32
    total = torch.zeros(_COUNT, dtype=torch.float64, device=flat.device)
    squares = torch.zeros((), dtype=torch.float64, device=flat.device)
    vectors = _vectors(wide, flat.device)
    for number, rows in enumerate(torch.split(flat, _ROWS * _BLOCK)):
        rows = rows.to(wide)
        squares += torch.linalg.vector_norm(rows).double().square()
        whole = rows.numel() // _BLOCK
        blocks = [(rows[: whole * _BLOCK].view(whole, _BLOCK), vectors)] if whole else []
        if rows.numel() % _BLOCK:
            rest = rows[whole * _BLOCK :]
            blocks.append((rest[None], vectors[: rest.numel()]))
        for block, columns in blocks:
            total += ((block @ columns).double() * _signs(len(block), number, flat.device)).sum(0)
    *projections, square = torch.cat([total, squares[None]]).tolist()
    return Fingerprint((bits, tensor.dtype, tensor.shape), math.sqrt(square), tuple(projections))


def have_same_bits(a: Fingerprint | None, b: Fingerprint | None) -> bool:
    """Return whether two tensors have the same bits."""
    if a is None or b is None or a.bits != b.bits:
        return a is b
    return a.projections == b.projections or (math.isnan(a.norm) and math.isnan(b.norm))


def weighted_sum(terms: Iterable[tuple[float, Fingerprint]]) -> Projections:
    """Return the projections of a weighted sum of tensors."""
    products = [[weight * value for value in term.projections] for weight, term in terms]
    return tuple([sum(column) for column in zip(*products)]) if products else (0.0,) * _COUNT


def combined(a: Fingerprint | None, b: Fingerprint) -> Fingerprint:
    """Return the fingerprint of a sum; if there are two terms, without its bits, which cannot be known."""
    if a is None:
        return b
    projections = weighted_sum([(1.0, a), (1.0, b)])
    return Fingerprint((-1, *b.bits[1:]), length(projections), projections)


def length(a: Sequence[float], b: Sequence[float] | None = None) -> float:
    """Return the norm of what has these projections, or of the difference of two; nan if there is nan in it."""
    gaps = a if b is None else [x - y for x, y in zip(a, b)]
    return math.sqrt(sum([gap * gap for gap in gaps]) / len(gaps))


def dense(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor of any layout, without a graph."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


@lru_cache(maxsize=256)
def _vectors(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the random vectors of the elements of a block, of shape (block, projections)."""
    vectors = torch.randn(_BLOCK, _COUNT, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
    return vectors.to(device, dtype)


@lru_cache(maxsize=256)
def _signs(rows: int, seed: int, device: torch.device) -> Tensor:
    """Return random signs of so many blocks, of shape (blocks, projections)."""
    signs = torch.randint(2, (rows, _COUNT), generator=torch.Generator().manual_seed(seed), device="cpu")
    return (2 * signs - 1).to(device, torch.float64)
