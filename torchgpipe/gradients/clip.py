"""Clip gradients over several processes: their common norm is that of the norms of all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["clip_grad_norm"]


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
