"""The calls and the steps of a model in several threads: while a step runs, modules have aliases of their parameters.

A call in another thread would compute with the aliases, and its gradients would not arrive. So a step runs alone.
Calls of layers, and the parts of their backward that run layers again, may run at the same time as others; a call of
any other model and its backward have aliases as well, and run alone.

What a step runs may call the model itself, as a loss does that compares with the model's own output. Often it does so
in a worker, which is another thread. A worker runs in a copy of the context of the call that it works for, so the
context tells whose part a call is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torchgpipe.devices.interrupts import uninterrupted

__all__ = ["StepLock", "calls"]

#: The calls that this thread works for, the outermost first.
calls: ContextVar[tuple[object, ...]] = ContextVar("torchgpipe_calls", default=())


class StepLock:
    """Lets a step of a model run alone. Its owner can be copied and pickled: the copy has another one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders: set[object] = set()
        #: The last one that ran alone, with its thread, and how many wait to run alone.
        self._alone: object = None
        self._thread = 0
        self._waiting = 0

    def __reduce__(self) -> Any:
        return StepLock, ()

    @contextmanager
    def held(self, within: tuple[object, ...] = (), *, alone: bool = False) -> Iterator[None]:
        """Keep a step of another thread waiting for a ``with`` block.

        Args:
            within: further calls that this thread works for. A thread of the autograd engine has no context, and works
                for the calls in which its graph was made
            alone: whether to keep calls waiting as well, because the block exchanges parameters

        Raises:
            RuntimeError: a call would exchange parameters while other parts of the same call compute.
        """
        outer = calls.get()
        if not self._holders.isdisjoint((*outer, *within)):
            if alone and (self._alone not in self._holders or self._thread != threading.get_ident()):
                raise RuntimeError(
                    "a model is run by its own layers or its loss, while other parts of the same call compute with its "
                    "parameters; let them run a copy of the model"
                )
            yield
            return
        holder = object()
        token = calls.set((*outer, holder))
        try:
            if not alone:  # Who wants to run alone says so, and looks at the holders then: one sees the other.
                self._holders.add(holder)
            if alone or self._is_closed():
                self._wait(holder, alone=alone)
            yield
        finally:
            calls.reset(token)
            uninterrupted(partial(self._leave, holder))

    def _is_closed(self) -> bool:
        """Return whether a step runs alone, or waits to."""
        return bool(self._waiting) or self._alone in self._holders

    def _wait(self, holder: object, *, alone: bool) -> None:
        with self._changed:
            self._holders.discard(holder)
            self._waiting += alone
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not (self._holders if alone else self._is_closed()))
                self._holders.add(holder)
                if alone:
                    self._alone, self._thread = holder, threading.get_ident()
            finally:
                self._waiting -= alone

    def _leave(self, holder: object) -> None:
        self._holders.discard(holder)
        if self._waiting or holder is self._alone:
            with self._changed:
                self._changed.notify_all()
