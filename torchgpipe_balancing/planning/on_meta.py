"""Run a model on the meta device as it would run on an accelerator: where it looks at values, and in its attention.

A model that looks at a value there, such as whether a mask is all ones, raises. Usually it asks whether it may take a
shorter way, so the answer is yes: booleans are True, numbers 1, and of a mask every element counts. Where it asks
whether something is wrong, as whether labels are too large, no is the better answer, which `either_way` tries next.
And attention keeps what fused kernels keep, no matrix of all pairs, as the plain formula of the meta device would.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from torchgpipe.devices.torch_internals import (
    FUSED_ATTENTION,
    GROUPED_PRODUCT,
    READ_VALUE,
    DispatchMode,
    all_nonzero,
)

__all__ = ["as_on_accelerator", "either_way", "operations_counter"]

T = TypeVar("T")


def as_on_accelerator(*, answer: bool = True) -> ExitStack:
    """Return a context in which models run on the meta device as on an accelerator.

    Args:
        answer: what the model is told where it looks at a value
    """
    stack = ExitStack()
    stack.enter_context(_Values(answer))
    stack.enter_context(_Attention())
    stack.enter_context(all_nonzero())
    return stack


def either_way(run: Callable[[], T]) -> T:
    """Return what ``run`` returns in that context, with the answer no if it fails with yes.

    Raises:
        Exception: it fails both ways; this is the error with the answer yes.
    """
    try:
        with as_on_accelerator():
            return run()
    except Exception as error:
        try:
            with as_on_accelerator(answer=False):
                return run()
        except Exception:
            raise error from None


def operations_counter() -> FlopCounterMode:
    """Return what counts floating point operations, those of attention and of experts included."""
    counts = {FUSED_ATTENTION: _count_attention, GROUPED_PRODUCT: _count_experts}
    return FlopCounterMode(display=False, custom_mapping=counts)


def _count_experts(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    return int(2 * rows[0] * rows[1] * weights[-1])


def _count_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = query, (*query[:2], *key[2:]), (*query[:2], *value[2:])
    return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]


class _Values(DispatchMode):  # type: ignore[no-untyped-call]
    """Answers for values."""

    def __init__(self, answer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_VALUE and args[0].is_meta:
            return torch.full((), self._answer or args[0].dtype is not torch.bool, dtype=args[0].dtype).item()
        if func is GROUPED_PRODUCT.default and args[0].is_meta:  # That of the meta device wants bfloat16.
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        return func(*args, **(kwargs or {}))


class _Attention(TorchFunctionMode):
    """Computes attention by a fused kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and args[:1] and args[0].is_meta:
            found = _fused(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return attention; None if no fused kernel computes it: of a bias that is trained, or of other sizes of values."""
    if (attn_mask is not None and attn_mask.requires_grad) or query.shape[-1] != value.shape[-1]:
        return None
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    if query.dim() != 4:
        query, key, value = [tensor.reshape(-1, *tensor.shape[-3:]) for tensor in (query, key, value)]
    output: Tensor = FUSED_ATTENTION(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
