"""Keep the parameters of one of several processes from what would clip by the norm of their gradients alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from torch import nn

__all__ = ["not_for_norms"]


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
