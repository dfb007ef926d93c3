"""Keep other threads from modules whose state a second run has exchanged for its own.

A second run finds copies of buffers in its modules (see `state`). Another thread that runs the same modules forward
must not find the copies. So modules with buffers run in one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["exclusive"]

#: Kept beside the modules, because a lock in a module could not be copied or pickled.
_locks: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
_locks_lock = threading.Lock()

#: The modules that this thread, or the thread that it works for, has locked.
_held: ContextVar[frozenset[nn.Module]] = ContextVar("torchgpipe_held_modules", default=frozenset())


@contextmanager
def exclusive(modules: frozenset[nn.Module]) -> Iterator[None]:
    """Keep other threads from running ``modules`` for a ``with`` block.

    Workers of a pipeline within the block run in a copy of its context, so they may run ``modules``.
    """
    held = _held.get()
    if held >= modules:
        yield
        return
    wanted = modules - held
    with _locks_lock:
        locks = [_locks.setdefault(module, threading.Lock()) for module in sorted(wanted, key=id)]
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        token = _held.set(held | wanted)
        try:
            yield
        finally:
            _held.reset(token)
