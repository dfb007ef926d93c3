"""Clip gradients over several processes: their common norm is that of the norms of all processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

__all__ = ["clip_grad_norm", "not_for_norms"]


def not_for_norms(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield the parameters of one of several processes, but not to what clips by the norm of their gradients.

    That would be the norm of one process, which another one scales by another factor, and nothing tells of it.

    Raises:
        RuntimeError: a function ``clip_grad_norm_`` asks for them, such as that of PyTorch or of accelerate.
    """
    caller = inspect.currentframe()
    for _ in range(2):  # It may do so in a comprehension.
        caller = None if caller is None else caller.f_back
        if caller is not None and caller.f_code.co_name == "clip_grad_norm_":
            raise RuntimeError(
                "clip_grad_norm_(model.parameters(), ...) takes the norm of the gradients of this process, and each "
                "process has a part of the model: use model.clip_grad_norm_(...), in all processes"
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
