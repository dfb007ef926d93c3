"""Hooks of parameters hear whole gradients only.

A checkpointed cell differentiates its own small graph, whose leaves are the parameters themselves, and PyTorch calls
a parameter's hooks there too: once for every micro-batch. They are to be called once, with the sum, when the
engine delivers it. So while a thread differentiates such a graph, the hooks do not hear what this thread does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

__all__ = ["without_hooks"]


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
