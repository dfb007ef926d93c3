"""What operations do, as far as function modes and names tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DIFFERENTIATES", "OF_THE_ORIGINAL", "changes_in_place"]

#: What asks for a tensor's description, its whole gradient or its memory on the host: the tensor itself answers that.
OF_THE_ORIGINAL = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.grad.__get__,  # type: ignore[union-attr]
    torch.Tensor.retains_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
    torch.Tensor.stride,
    torch.Tensor.register_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
}

DIFFERENTIATES = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}

_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "div", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
}

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def changes_in_place(func: Callable[..., Any]) -> bool:
    """Return whether ``func`` changes its first argument in place: its values, shape, graph or memory."""
    name = func.__name__
    return name in _IN_PLACE or func == _SET_DATA or (name.endswith("_") and not name.endswith("__"))
