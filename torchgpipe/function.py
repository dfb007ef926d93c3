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
from torch.autograd.graph import GradientEdge

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
    outputs: Sequence[Tensor | GradientEdge],
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    *,
    keep_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs`` as `torch.autograd.grad` gives them, None for an input that was not used.

    Nothing is accumulated into ``.grad``.
    """
    if _engine is None:
        public: Any = torch.autograd.grad
        return public(outputs, inputs, grads, retain_graph=keep_graph, allow_unused=True)  # type: ignore[no-any-return]
    # The third is whether to make a graph of this.
    result: tuple[Tensor | None, ...] = _engine.run_backward(
        tuple(outputs), tuple(grads), keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return result
