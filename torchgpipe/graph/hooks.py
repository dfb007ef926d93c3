"""Hooks of parameters: keeping them from hearing parts of a gradient, or None.

A cell differentiates a small graph of its own, which ends in the parameters, so PyTorch calls the hooks of a parameter
there: with the gradient of one micro-batch. A hook must hear the gradient of the mini-batch, once.

The caller's graph leads to all parameters of a partition, because which of them a checkpointed cell uses shows at
backward only. PyTorch then calls the hooks of all. An optimizer that steps in a hook would move a layer without use.
Without checkpointing, it leads to all outputs of a cell, though the next partition may use one of two.

Hooks on the nodes at which gradients are accumulated cannot be listed; to look whether there is one leaves an empty
hook behind, which takes the interpreter's lock at every later accumulation. They are not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from torchgpipe.devices.torch_internals import (
    current_pass,
    gradient_hooks,
    hooks_behind_accumulation,
    versions,
)

__all__ = ["refuse_none", "refuse_none_behind", "without_hooks"]


#: Whether this thread differentiates the graph of a cell.
_in_a_cell: ContextVar[bool] = ContextVar("torchgpipe_in_a_cell", default=False)


class _Whole:
    """A hook that hears whole gradients only. It takes the place of the hook in the dict of the tensor."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *heard: Any) -> Any:
        return None if heard[-1] is None or _in_a_cell.get() else self.hook(*heard)


class _Behind:
    """A hook behind accumulation that runs if something was accumulated. It takes the place of the hook in the dict.

    Attributes:
        unused: the last backward pass that had no gradient for the parameter so far, with the state of ``.grad``
    """

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook
        self.unused = (-1, (0, 0))

    def __call__(self, parameter: Tensor) -> None:
        if self.unused != (current_pass(), _state(parameter.grad)):
            self.hook(parameter)


def _state(grad: Tensor | None) -> tuple[int, int]:
    """Return what tells a gradient from the same one after something was added to it."""
    return id(grad), versions([grad])[0]


def refuse_none(parameter: Tensor) -> None:
    """Let no hook of ``parameter`` run in this pass, unless a gradient arrives, perhaps from elsewhere.

    Args:
        parameter: a leaf that this pass has had no gradient for so far
    """
    _wrap(gradient_hooks(parameter), _Whole)
    behind = hooks_behind_accumulation(parameter)
    _wrap(behind, _Behind)
    for hook in behind.values():
        if isinstance(hook, _Behind):
            hook.unused = current_pass(), _state(parameter.grad)


def refuse_none_behind(node: Any, grads: Sequence[Tensor | None]) -> None:
    """Let no hook of the parameters behind a tensor without a gradient run, see `refuse_none`.

    Nodes of the pipeline lead to all outputs of a cell, so the engine goes on to one that is not used. In the plain
    model nothing leads there.

    Args:
        node: a node of the pipeline, which is differentiated
        grads: the gradients of its tensors
    """
    if all([grad is not None for grad in grads]):
        return
    pending = [behind for (behind, _), grad in zip(node.next_functions, grads, strict=True) if grad is None]
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            refuse_none(node.variable)
        pending += [behind for behind, _ in node.next_functions]


def _wrap(hooks: dict[int, Any], kind: type[_Whole] | type[_Behind]) -> None:
    for key, hook in list(hooks.items()):
        if not isinstance(hook, kind):
            hooks[key] = kind(hook)


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep the hooks of ``tensors`` from hearing what this thread differentiates in a ``with`` block."""
    for tensor in tensors:
        _wrap(gradient_hooks(tensor), _Whole)
    token = _in_a_cell.set(True)
    try:
        yield
    finally:
        _in_a_cell.reset(token)
