"""The two doors to the autograd engine that every cell goes through, without the wrappers in front of them.

The public `torch.autograd.Function.apply`, `backward` and `grad` check their arguments for cases that cannot occur here
(vmap, function transforms, several calling conventions), at 4 and 10 to 25 microseconds a call: as much as a small
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchgpipe.devices.typing import Leaf

__all__ = ["Edge", "Function", "accumulate", "gradients", "refuse_transforms", "transforms_are_active"]

#: Where a graph is entered: a node of autograd, and which of its outputs. It holds no tensor.
Edge = GradientEdge


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


def transforms_are_active() -> bool:
    """Return whether a function transform of `torch.func`, such as `vmap` or `grad`, is active."""
    return torch._C._are_functorch_transforms_active()


def refuse_transforms() -> None:
    """Raise if a function transform of `torch.func` is active."""
    if transforms_are_active():
        raise RuntimeError(
            "transforms of torch.func cannot go through checkpointed partitions or several devices; use "
            "checkpoint='never' on one device, or transform the plain model"
        )


_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def accumulate(roots: Sequence[Edge], grads: Sequence[Tensor], keep_graph: bool) -> None:
    """Add the gradients of all leaves of a graph to their ``.grad``, as `torch.autograd.backward` does.

    Args:
        roots: where the graph is entered
        grads: a gradient for each root
        keep_graph: whether the graph will be differentiated again
    """
    _run_backward(tuple(roots), tuple(grads), keep_graph, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients(roots: Sequence[Edge], grads: Sequence[Tensor], inputs: Sequence[Tensor], keep_graph: bool) -> list[Leaf]:
    """Return the gradients of ``inputs`` as `torch.autograd.grad` does, None for an input that was not used.

    Args:
        roots: where the graph is entered
        grads: a gradient for each root
        inputs: the tensors that gradients are wanted of
        keep_graph: whether the graph will be differentiated again
    """
    return list(
        _run_backward(
            tuple(roots), tuple(grads), keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    )
