"""Hooks of parameters: finding them, and keeping them from being called with a part of a gradient.

A cell differentiates its own small graph, whose leaves are the parameters themselves, and PyTorch calls the hooks of a
parameter there too: once for every micro-batch. A hook must be called once, with the sum, when the engine delivers the
sum. So while a thread differentiates such a graph, hooks do not hear what this thread does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

__all__ = ["has_hooks", "without_hooks"]


def has_hooks(parameter: Tensor, node: Any) -> bool:
    """Return whether Python is called when a gradient of ``parameter`` is accumulated.

    Args:
        parameter: a leaf
        node: its AccumulateGrad node, which may have hooks of its own
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return True
    for register in (node.register_hook, node.register_prehook):
        # A node does not tell of its hooks, but a handle has the dict that all of them are in.
        handle = register(_ignore)
        others = len(handle.hooks_dict_ref()) > 1
        handle.remove()
        if others:
            return True
    return False


def _ignore(*_: Any) -> None:
    """Do nothing, as a hook."""


class _Thread(threading.local):
    is_quiet = False


_thread = _Thread()


class _Muted:
    """Stands for a hook in the dict of its tensor, and leaves it out in a quiet thread."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor) -> Tensor | None:
        return None if _thread.is_quiet else self.hook(grad)


#: How many threads need the hooks of a dict muted, by the id of the dict.
_counts: dict[int, int] = {}
_counts_lock = threading.Lock()


def without_hooks(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Keeps this thread from calling the hooks of ``tensors`` for a ``with`` block."""
    hooked = [tensor._backward_hooks for tensor in tensors if tensor._backward_hooks]
    return _mute(hooked) if hooked else nullcontext()


@contextmanager
def _mute(dicts: list[Any]) -> Iterator[None]:
    with _counts_lock:
        for hooks in dicts:
            _counts[id(hooks)] = _counts.get(id(hooks), 0) + 1
            hooks.update({key: hook if isinstance(hook, _Muted) else _Muted(hook) for key, hook in hooks.items()})
    was_quiet, _thread.is_quiet = _thread.is_quiet, True
    try:
        yield
    finally:
        _thread.is_quiet = was_quiet
        with _counts_lock:
            for hooks in dicts:
                _counts[id(hooks)] -= 1
                if _counts[id(hooks)] == 0:
                    del _counts[id(hooks)]
                    hooks.update({key: hook.hook for key, hook in hooks.items() if isinstance(hook, _Muted)})
