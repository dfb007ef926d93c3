"""Merge means and variances of samples that were seen in parts, without the samples: plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Moments", "merge"]


class Moments(NamedTuple):
    """Size, mean and variance of some samples, for each channel.

    Attributes:
        n: the number of values of each channel; never 1
        mean: the mean of the values, of shape (channels,); zero where n is 0
        var: the unbiased variance of the values, of shape (channels,); zero where n is 0
    """

    n: int
    mean: Tensor
    var: Tensor

    def to(self, like: Tensor) -> Moments:
        """Return the same moments on the device and with the dtype of ``like``."""
        return Moments(self.n, self.mean.to(like), self.var.to(like))


def merge(parts: Iterable[Moments]) -> Moments:
    """Return the moments of all samples together.

    The formula squares only differences of means. Squares of values or of means would cancel::

        mean = mean_a + (mean_b - mean_a) n_b / n                  n = n_a + n_b
        S    = S_a + S_b + (mean_b - mean_a)² n_a n_b / n          S = (n - 1) var

    This is the updating formula of T. F. Chan, G. H. Golub and R. J. LeVeque, `Updating Formulae and a
    Pairwise Algorithm for Computing Sample Variances
    <http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf>`_, 1979. Micro-batches have the
    same size, except for the last. Parts of the same size are merged in one operation, by the variance of their means.
    """
    sizes: dict[int, list[Moments]] = {}
    for part in parts:
        sizes.setdefault(part.n, []).append(part)
    return reduce(_merge_two, [_merge_equal(group) for group in sizes.values()])


def _merge_equal(parts: Sequence[Moments]) -> Moments:
    if len(parts) == 1:
        return parts[0]
    n = parts[0].n * len(parts)
    between, mean = torch.var_mean(torch.stack([part.mean for part in parts]), 0, correction=0)
    within = torch.stack([part.var for part in parts]).mean(0)
    return Moments(n, mean, within * ((n - len(parts)) / (n - 1)) + between * (n / (n - 1)))


def _merge_two(a: Moments, b: Moments) -> Moments:
    n = a.n + b.n
    delta = b.mean - a.mean
    within = a.var * ((a.n - 1) / (n - 1)) + b.var * ((b.n - 1) / (n - 1))
    between = delta.square() * (a.n / n * (b.n / (n - 1)))
    return Moments(n, a.mean + delta * (b.n / n), within + between)
