"""Keeps a model in float64, also where its code asks for float32.

Many losses and attentions convert by `.float()` or in `softmax`, and some masks have the default type. A comparison to
1e-10 needs float64 in all that is summed over micro-batches, and float64's masks overflow in float32. Conversions by
`.to(torch.float32)` stay: they are within one operation of a micro-batch, and the same in both runs.
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
    """Make float64 the default type, and what `Tensor.float` and `softmax` convert to, in a ``with`` block."""
    before, convert = torch.get_default_dtype(), Tensor.float

    def keep(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        small = tensor.dtype.is_floating_point and tensor.dtype != torch.float64
        return convert(tensor, *args, **kwargs) if small or tensor.is_complex() else tensor.to(torch.float64)

    torch.set_default_dtype(torch.float64)

    def precise(function: Any) -> Any:
        def call(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
            result: Tensor = function(*args, dtype=torch.float64 if dtype == torch.float32 else dtype, **kwargs)
            return result

        return call

    replaced = {name: getattr(functional, name) for name in ("softmax", "log_softmax")}
    Tensor.float = keep  # type: ignore[method-assign]
    for name, function in replaced.items():
        setattr(functional, name, precise(function))
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(functional, name, function)
        Tensor.float = convert  # type: ignore[method-assign]
        torch.set_default_dtype(before)
