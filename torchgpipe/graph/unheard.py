"""Hooks of parameters that got no gradient.

A function with several inputs ends its backward with a gradient for each, or None, and autograd goes on to all of them:
the hooks of a parameter that got nothing but None are called, and an optimizer that steps in one moves the parameter by
what was in ``.grad`` before. The plain model does not come to that parameter. What a cell has used shows at backward
only, when it is too late to leave anything out, so this is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchgpipe.devices.torch_internals import gradient_hooks, has_gradient_hooks
from torchgpipe.devices.typing import Leaf

__all__ = ["hook_first", "refuse_unheard"]


def hook_first(parameter: Tensor, hook: Callable[[Leaf], None]) -> Any:
    """Register a hook of a parameter in front of all others, and return its handle."""
    others = dict(gradient_hooks(parameter))
    gradient_hooks(parameter).clear()
    handle: Any = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    gradient_hooks(parameter).update(others)  # Autograd calls them in the order in which the dict got them.
    return handle


def refuse_unheard(ends: Sequence[tuple[Any, int]], grads: Sequence[Leaf]) -> None:
    """Let this backward pass fail at a parameter with a hook that gets no gradient from anywhere.

    Args:
        ends: the nodes of parameters, where the gradients of a function's inputs go on
        grads: these gradients
    """
    for (node, _), grad in zip(ends, grads):
        if grad is None and hasattr(node, "variable") and has_gradient_hooks(node.variable):
            _refuse_none(node.variable)


def _refuse_none(parameter: Tensor) -> None:
    def refuse(grad: Leaf) -> None:
        handle.remove()
        if grad is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook, but nothing that this pass differentiates "
                "has used the parameter: the hook would be called without a gradient, and an optimizer that steps "
                "there would move the parameter; freeze it (requires_grad_(False)) as long as it is not used, remove "
                "the hook, or use model.step(...), which calls the hooks of what was used"
            )

    handle = hook_first(parameter, refuse)
