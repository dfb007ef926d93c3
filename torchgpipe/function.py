"""The two doors to the autograd engine that every cell goes through, without the wrappers in front of them.

The public `torch.autograd.Function.apply` and `torch.autograd.grad` check their arguments for cases that cannot
occur here (vmap, function transforms, several calling conventions), at 4 and 10 to 25 microseconds a call: as
much as a small layer. Where the private entrance is not as expected, the public one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Function", "gradients", "refuse_transforms"]


class _Direct(torch.autograd.function.FunctionMeta):
    """Leaves out what is between the engine and a function's own ``forward`` and ``backward``."""

    def __init__(cls: Any, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
        super().__init__(name, bases, attributes)  # type: ignore[no-untyped-call]
        cls.apply = super(torch.autograd.Function, cls).apply  # type: ignore[misc]
        node = getattr(cls, "_backward_cls", None)
        if node is not None:
            node.apply = cls.backward


class Function(torch.autograd.Function, metaclass=_Direct):
    """An autograd function whose ``apply`` goes straight to the engine, and does not know function transforms.

    It has a ``backward``, and no ``vjp``.
    """

    apply: Any


def refuse_transforms() -> None:
    """Raises if a function transform of `torch.func`, such as `vmap` or `grad`, is active."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "transforms of torch.func cannot go through checkpointed partitions or several devices; use "
            "checkpoint='never' on one device, or transform the plain model"
        )


_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs`` as `torch.autograd.grad` gives them, None for an input that was not used.

    Nothing is accumulated into ``.grad`` and the graph is freed.
    """
    if _engine is None:
        return torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    # Arguments: keep the graph, create a graph, ...
    result: tuple[Tensor | None, ...] = _engine.run_backward(
        tuple(outputs), tuple(grads), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return result
