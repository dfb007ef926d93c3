"""Fingerprints tell tensors of other bits apart, and estimate how far apart they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchgpipe.model.fingerprint import fingerprint, have_same_bits, length, weighted_sum

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
]


@pytest.mark.parametrize("dtype", DTYPES)
@given(size=st.sampled_from([1, 2, 100, 16_384, 16_385, 40_000]), data=st.data())
def test_one_bit_makes_another_fingerprint(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = torch.randn(size).mul(100).to(dtype)
    other = tensor.clone()
    assert have_same_bits(fingerprint(tensor), fingerprint(other))
    k = data.draw(st.integers(0, size - 1))
    bits = other.view(torch.uint8)
    bits[k * tensor.element_size()] ^= 1
    assert not have_same_bits(fingerprint(tensor), fingerprint(other))


def test_swapped_elements_shapes_and_types_make_another_one() -> None:
    tensor = torch.randn(6)
    others = [tensor.flip(0), tensor.view(2, 3), tensor.double(), None]
    assert not any([have_same_bits(fingerprint(tensor), None if one is None else fingerprint(one)) for one in others])
    assert have_same_bits(None, None)
    assert have_same_bits(fingerprint(torch.tensor([math.nan, 1.0])), fingerprint(torch.tensor([math.nan, 1.0])))


@given(size=st.sampled_from([3, 1000, 50_000]), seed=st.integers(0, 1000))
def test_norms_of_differences_and_of_weighted_sums_are_estimated(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    known = [fingerprint(one) for one in (a, b, c)]
    torch.testing.assert_close(known[0].norm, float(a.norm()))
    gap = float((a - b).norm())
    assert gap / 3 < length(known[0].projections, known[1].projections) < 3 * gap
    joined = weighted_sum([(0.25, known[0]), (-2.0, known[1]), (1.0, known[2])])
    torch.testing.assert_close(
        torch.tensor(joined, dtype=torch.float64),
        torch.tensor(fingerprint(0.25 * a - 2 * b + c).projections, dtype=torch.float64),
        rtol=1e-9, atol=1e-9,
    )  # fmt: skip


def test_any_layout_has_one() -> None:
    dense = torch.randn(4, 3)
    assert have_same_bits(fingerprint(dense.to_sparse()), fingerprint(dense))
    assert fingerprint(torch.zeros(0)).norm == 0
