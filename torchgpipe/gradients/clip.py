"""Clip gradients over several processes: their common norm is that of the norms of all processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["clip_grad_norm", "not_for_norms"]

_CLIPS: Any = getattr(inspect.unwrap(nn.utils.clip_grad_norm_), "__code__", None)


def not_for_norms(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield the parameters of one of several processes, but not to PyTorch's functions that take the norm of them all.

    That would be the norm of one process, which another one scales by another factor, and nothing tells of it.

    Raises:
        RuntimeError: `torch.nn.utils.clip_grad_norm_` asks for them.
    """
    frame = inspect.currentframe()
    if frame is not None and frame.f_back is not None and frame.f_back.f_code is _CLIPS:
        raise RuntimeError(
            "torch.nn.utils.clip_grad_norm_(model.parameters(), ...) takes the norm of the gradients of this process, "
            "and each process has a part of the model: use model.clip_grad_norm_(...), in all processes"
        )
    yield from parameters


def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    counted: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    gather: Callable[[Tensor], Sequence[Tensor]],
) -> Tensor:
    """Scale the gradients of all processes so that their common norm is at most ``max_norm``.

    Args:
        parameters: the parameters of this process
        counted: those of them that count in this process, so that each counts in one
        max_norm: the largest norm
        norm_type: the type of the norm
        gather: returns the norms of all processes, given that of this one

    Returns:
        the norm before clipping
    """
    norm = nn.utils.get_total_norm([tensor.grad for tensor in counted if tensor.grad is not None], norm_type)
    norms = torch.stack([*gather(norm.double().cpu())])
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
