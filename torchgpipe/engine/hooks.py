"""Hooks of parameters: finding them, and keeping them from hearing parts of a gradient.

A cell differentiates a small graph of its own, which ends in the parameters, so PyTorch calls the hooks of a parameter
there: with the gradient of one micro-batch. A hook must hear the gradient of the mini-batch, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from torchgpipe.devices.torch_internals import gradient_hooks, has_gradient_hooks

__all__ = ["has_hooks", "without_hooks"]


def has_hooks(tensor: Tensor, node: Any) -> bool:
    """Return whether Python is called when a gradient of ``tensor``, a leaf with this node, is accumulated."""
    if has_gradient_hooks(tensor):
        return True
    for register in (node.register_hook, node.register_prehook):
        # A node does not list its hooks, but a handle has the dict that holds all of them.
        handle = register(_ignore)
        others = len(handle.hooks_dict_ref()) > 1
        handle.remove()
        if others:
            return True
    return False


def _ignore(*_: Any) -> None:
    """Do nothing, as a hook."""


#: Whether this thread differentiates the graph of a cell.
_in_a_cell: ContextVar[bool] = ContextVar("torchgpipe_in_a_cell", default=False)


class _Whole:
    """A hook that hears whole gradients only. It takes the place of the hook in the dict of the tensor, for good."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor) -> Tensor | None:
        return None if _in_a_cell.get() else self.hook(grad)


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep the hooks of ``tensors`` from hearing what this thread differentiates in a ``with`` block."""
    for tensor in tensors:
        hooks = gradient_hooks(tensor)
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _Whole):
                hooks[key] = _Whole(hook)
    token = _in_a_cell.set(True)
    try:
        yield
    finally:
        _in_a_cell.reset(token)
