"""Run a model on the meta device as it would run on an accelerator: where it looks at values, and in its attention.

A model that looks at a value there, such as whether a mask is all ones, raises. Usually it asks whether it may take a
shorter way, so the answer is yes: booleans are True, numbers 1, and of a mask every element counts. Where it asks
whether something is wrong, as whether labels are too large, no is the better answer, which `either_way` tries next.
And attention keeps what fused kernels keep, no matrix of all pairs, as the plain formula of the meta device would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from torchgpipe.devices.torch_internals import (
    FUSED_ATTENTION,
    GROUPED_PRODUCT,
    PLAIN_ATTENTION,
    READ_VALUE,
    DispatchMode,
    all_nonzero,
    attention_on_meta,
)

__all__ = ["as_on_accelerator", "either_way", "operations_counter"]

T = TypeVar("T")


@contextmanager
def as_on_accelerator(*, answer: bool = True) -> Iterator[_Values]:
    """Run models on the meta device as on an accelerator, and yield what answers where they look at values.

    Args:
        answer: what the model is told where it looks at a value
    """
    with _Values(answer) as values, attention_on_meta(_fused), all_nonzero():
        yield values


def either_way(run: Callable[[], T]) -> tuple[T, bool]:
    """Return what ``run`` returns in that context, the answer no if it fails with yes, and whether it read numbers.

    Raises:
        Exception: it fails both ways; this is the error with the answer yes.
    """
    try:
        with as_on_accelerator() as values:
            return run(), values.numbers
    except Exception as error:
        try:
            with as_on_accelerator(answer=False) as values:
                return run(), values.numbers
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
    """Answers for values.

    Attributes:
        numbers: whether a number was read, which is more than an answer
    """

    def __init__(self, answer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer, self.numbers = answer, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_VALUE and args[0].is_meta:
            self.numbers |= args[0].dtype is not torch.bool
            return torch.full((), self._answer or args[0].dtype is not torch.bool, dtype=args[0].dtype).item()
        if func is GROUPED_PRODUCT.default and args[0].is_meta:  # That of the meta device wants bfloat16.
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        return func(*args, **(kwargs or {}))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention, by the plain formula where no fused kernel computes it: of a bias that is trained, of values of
    another size, without one of the four dimensions, or with dropout, for which the CPU has none.
    """
    output: Tensor
    is_trained = attn_mask is not None and attn_mask.requires_grad
    if is_trained or dropout_p or query.shape[-1] != value.shape[-1] or query.dim() != 4:
        more = {"scale": scale, "enable_gqa": enable_gqa}
        output = PLAIN_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **more)[0]
        return output
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    output = FUSED_ATTENTION(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
