"""Which operations of glue need values of tensors, as far as function modes and names tell it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchgpipe.devices.torch_internals import draws_of_distributions

__all__ = ["DRAWS", "MASKS", "READS", "SHAPE_ONLY", "reads_values"]

_T = Tensor

#: What depends on the shape of the first argument alone.
SHAPE_ONLY = {
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like,
    _T.new_zeros, _T.new_ones, _T.new_full, _T.new_empty, _T.new_tensor,
}  # fmt: skip

#: What draws random numbers.
DRAWS = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.normal, torch.multinomial,
    torch.rand_like, torch.randn_like, torch.randint_like, torch.poisson, torch.binomial,
    *draws_of_distributions, torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
    torch.rrelu, torch.rrelu_, functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, functional.rrelu, functional.gumbel_softmax,
    _T.bernoulli, _T.bernoulli_, _T.uniform_, _T.normal_, _T.random_, _T.multinomial, _T.exponential_, _T.geometric_,
    _T.log_normal_, _T.cauchy_,
}  # fmt: skip

#: What tells values to Python, or returns a tensor whose shape depends on values.
READS = {
    _T.item, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__contains__, _T.tolist, _T.numpy, _T.__array__,
    _T.is_nonzero, torch.is_nonzero, _T.equal, torch.equal, _T.allclose, torch.allclose,
    _T.nonzero, torch.nonzero, _T.argwhere, torch.argwhere, _T.unique, torch.unique, _T.unique_consecutive,
    torch.unique_consecutive, _T.bincount, torch.bincount, _T.masked_select, torch.masked_select,
    functional.ctc_loss, torch.ctc_loss,
}  # fmt: skip


def reads_values(func: Callable[..., Any], args: Any, is_owned: Callable[[Tensor], bool]) -> bool:
    """Return whether an operation needs values that one process has.

    Args:
        func: the operation
        args: its arguments, of which a column owns at least one
        is_owned: whether a column owns a tensor
    """
    if func in READS:
        return True
    if func is _T.__getitem__:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any([isinstance(part, Tensor) and part.dtype in MASKS and is_owned(part) for part in parts])
    if func is torch.where:
        return len(args) == 1
    if func in (torch.repeat_interleave, _T.repeat_interleave):
        return len(args) > 1 and isinstance(args[1], Tensor) and is_owned(args[1])
    return False


#: The dtypes of masks.
MASKS = (torch.bool, torch.uint8)
