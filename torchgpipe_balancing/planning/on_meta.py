"""Run a model on the meta device as it would run on an accelerator: where it looks at values, and in its attention.

A model that looks at a value there, such as whether a mask is all ones, raises. Usually it asks whether it may take a
shorter way, so the answer is yes: booleans are True, numbers 1, and of a mask every element counts. And attention, of
which PyTorch has only the plain formula on the meta device, keeps what fused kernels keep: no matrix of all pairs.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

__all__ = ["as_on_accelerator", "operations_counter"]

_ATEN = torch.ops.aten
_FUSED = _ATEN._scaled_dot_product_flash_attention_for_cpu.default


def as_on_accelerator() -> ExitStack:
    """Return a context in which models run on the meta device as on an accelerator."""
    stack = ExitStack()
    stack.enter_context(_Values())  # type: ignore[no-untyped-call]
    stack.enter_context(_Attention())
    stack.enter_context(torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True))  # type: ignore[attr-defined]
    return stack


def operations_counter() -> FlopCounterMode:
    """Return what counts floating point operations, those of attention and of experts included."""
    counts = {_FUSED.overloadpacket: _count_attention, _ATEN._grouped_mm: _count_experts}
    return FlopCounterMode(display=False, custom_mapping=counts)


def _count_experts(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    return int(2 * rows[0] * rows[1] * weights[-1])


def _count_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = query, (*query[:2], *key[2:]), (*query[:2], *value[2:])
    return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers for values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
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
    output: Tensor = _FUSED(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
