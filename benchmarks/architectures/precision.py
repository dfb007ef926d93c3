"""Keeps a model in float64, also where its code asks for float32.

Many losses convert logits by `.float()` or in `log_softmax`, and some masks have the default type. A comparison to
1e-10 needs float64 in all that is summed over micro-batches. Conversions by `.to(torch.float32)` stay: they are within
one operation of a micro-batch, and the same in both runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["in_float64"]


@contextmanager
def in_float64() -> Iterator[None]:
    """Make float64 the default type, and let `Tensor.float` and `log_softmax` convert to it, in a ``with`` block."""
    before, convert = torch.get_default_dtype(), Tensor.float

    def keep(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        small = tensor.dtype.is_floating_point and tensor.dtype != torch.float64
        return convert(tensor, *args, **kwargs) if small or tensor.is_complex() else tensor.to(torch.float64)

    torch.set_default_dtype(torch.float64)
    log_softmax = functional.log_softmax

    def precise(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return log_softmax(*args, dtype=torch.float64 if dtype == torch.float32 else dtype, **kwargs)

    Tensor.float = keep  # type: ignore[method-assign]
    functional.log_softmax = precise
    try:
        yield
    finally:
        functional.log_softmax = log_softmax
        Tensor.float = convert  # type: ignore[method-assign]
        torch.set_default_dtype(before)
