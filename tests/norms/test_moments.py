"""The merged moments of parts equal the moments of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torchgpipe.norms.moments import Moments, merge


def moments(samples: Tensor) -> Moments:
    """Return the moments of samples of shape (n, channels)."""
    if len(samples) == 0:
        return Moments(0, torch.zeros_like(samples.sum(0)), torch.zeros_like(samples.sum(0)))
    var, mean = torch.var_mean(samples, 0)
    return Moments(len(samples), mean, var)


@pytest.mark.parametrize("sizes", [[5], [4, 4, 4], [4, 4, 3], [2, 7, 2, 3], [0, 4], [4, 0, 4, 2]])
def test_of_parts_of_any_sizes(sizes: Sequence[int]) -> None:
    samples = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    n, mean, var = merge(map(moments, samples.split(list(sizes))))
    assert n == sum(sizes)
    torch.testing.assert_close(mean, samples.mean(0))
    torch.testing.assert_close(var, samples.var(0))
