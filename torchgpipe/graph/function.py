"""The two doors to the autograd engine that every cell goes through, without the checks in front of them.

The public `torch.autograd.Function.apply`, `backward` and `grad` look for faults and function transforms that cannot
occur here, which takes a fifth of the host time of a small cell. Function transforms are refused once for each call
instead (`refuse_transforms`). A pass that adds to ``.grad`` is run in `unshared`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchgpipe.devices.torch_internals import (
    apply_directly,
    forward_mode_is_active,
    run_backward,
    shares_memory,
    transforms_are_active,
)
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.graph.phony import get_phony

__all__ = [
    "Edge",
    "Function",
    "accumulate",
    "gradients",
    "mark_frozen",
    "nodes_behind",
    "refuse_transforms",
    "unshared",
]

#: Where a graph is entered: a node of autograd, and which of its outputs. It holds no tensor.
Edge = GradientEdge


class Function(torch.autograd.Function):
    """An autograd function whose ``apply`` goes straight to the engine, and does not know function transforms."""

    apply: Any = apply_directly


def mark_frozen(ctx: Any, outputs: Leaves, needs: Sequence[bool]) -> None:
    """Let outputs of a function that need no gradient not require one; autograd would take all of them along.

    Args:
        ctx: the context of the function
        outputs: what its forward returns
        needs: for each output, whether it needs a gradient
    """
    frozen = [output for output, need in zip(outputs, needs) if output is not None and not need]
    if frozen:
        ctx.mark_non_differentiable(*frozen)


def refuse_transforms() -> None:
    """Raise if a function transform of `torch.func`, or forward-mode differentiation, is active."""
    if forward_mode_is_active():
        raise RuntimeError(
            "forward-mode differentiation (torch.autograd.forward_ad) cannot go through a pipeline, which would lose "
            "the tangents; use the plain model"
        )
    if transforms_are_active():
        raise RuntimeError(
            "transforms of torch.func cannot go through checkpointed partitions or several devices; use "
            "checkpoint='never' on one device, or transform the plain model"
        )


def accumulate(roots: Sequence[Edge], grads: Sequence[Tensor], keep_graph: bool, leaves: Sequence[Tensor] = ()) -> None:
    """Add the gradients of the leaves of a graph to their ``.grad``, as `torch.autograd.backward` does.

    Args:
        roots: where the graph is entered
        grads: a gradient for each root
        keep_graph: whether the graph will be differentiated again
        leaves: the leaves that get a gradient (default: all)
    """
    run_backward(
        tuple(roots), tuple(grads), keep_graph, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
    )


def gradients(roots: Sequence[Edge], grads: Sequence[Tensor], inputs: Sequence[Tensor], keep_graph: bool) -> list[Leaf]:
    """Return the gradients of ``inputs`` as `torch.autograd.grad` does, None for an input that was not used.

    Args:
        roots: where the graph is entered
        grads: a gradient for each root
        inputs: the tensors that gradients are wanted of
        keep_graph: whether the graph will be differentiated again
    """
    return list(
        run_backward(
            tuple(roots), tuple(grads), keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    )


@contextmanager
def unshared(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Give first gradients that arrive in a ``with`` block memory of their own: nothing else changes with them.

    Autograd may make one tensor the gradient of a parameter and of an input, as views of the same memory. A plain
    backward pass has used the gradient of the input up before anything is added to ``.grad``. Here it may wait for
    another cell, while the next micro-batch adds to ``.grad`` in place.
    """
    fresh = [parameter for parameter in parameters if parameter.grad is None and parameter.requires_grad]
    yield
    for parameter in fresh:
        grad = parameter.grad
        if grad is not None and grad.layout is torch.strided and shares_memory(grad):
            parameter.grad = grad.clone()


class _Ends(Function):
    """Forward: a phony. Nothing is differentiated here."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return get_phony(torch.device("cpu"))


def nodes_behind(parameters: Sequence[Tensor]) -> list[Any]:
    """Return the nodes at which the gradients of parameters arrive, as the one node in front of all of them knows them.

    PyTorch's own `get_gradient_edge` makes a view and a node for each parameter, in every step.
    """
    with torch.enable_grad():
        phony: Any = _Ends.apply(*parameters) if parameters else None
    return [] if phony is None else [node for node, _ in phony.grad_fn.next_functions]
