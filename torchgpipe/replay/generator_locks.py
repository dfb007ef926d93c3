"""Locks of generators: one cell at a time draws from a generator, and a cell that has it may go on from another state.

The CPU has one generator for all threads, so cells that draw from it run one after the other, on whatever device they
are. An accelerator has one for each device, on which cells run one after the other anyway; two steps at once share it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.generators import Generator, go_on_from, state_of

__all__ = ["are_those_of_the_process", "borrowed", "cpu_lock", "current_locks", "own_locks", "sharing", "using"]


class _Locks(dict[torch.device, Any]):
    """By device, the lock that is held while the state of its generator is looked at or changed."""

    def __missing__(self, device: torch.device) -> Any:
        return self.setdefault(device, threading.RLock())


_process_locks = _Locks()
#: The locks of this process, or those in their place inside a block that holds some of them.
_locks: ContextVar[_Locks] = ContextVar("torchgpipe_generators", default=_process_locks)
_nothing = nullcontext()


def cpu_lock() -> Any:
    """Return the lock that is held while the state of the CPU's generator is looked at or changed."""
    return _locks.get()[torch.default_generator.device]


def current_locks() -> _Locks:
    """Return the locks in use here, for `using` in a thread that does not know of them."""
    return _locks.get()


def are_those_of_the_process() -> bool:
    """Return whether no block around this one holds a generator for all that is inside of the block."""
    return _locks.get() is _process_locks


@contextmanager
def sharing(generators: Iterable[Generator]) -> Iterator[None]:
    """Hold generators of one or two devices for a ``with`` block; pipelines inside share them among themselves."""
    locks = _locks.get()
    first, *others = [locks[device] for device in {generator.device: None for generator in generators}]
    with first, others[0] if others else _nothing:
        # A pipeline inside of this block has workers, which must not wait for this thread. As `own_locks`, but faster.
        token = _locks.set(_Locks())
        try:
            yield
        finally:
            _locks.reset(token)


@contextmanager
def borrowed(starts: Mapping[Generator, Tensor | int]) -> Iterator[list[Tensor]]:
    """Let generators of one or two devices go on from states or seeds in a ``with`` block, and put them back after it.

    Provide the states that they begin with; nobody else draws from them meanwhile.
    """
    with sharing(starts):
        before = [state_of(generator) for generator in starts]
        try:
            for generator, start in starts.items():
                go_on_from(generator, start)
            yield [state_of(generator) for generator in starts]
        finally:
            for generator, state in zip(starts, before):
                go_on_from(generator, state)


@contextmanager
def using(locks: _Locks) -> Iterator[None]:
    """Use these locks for generators in a ``with`` block."""
    token = _locks.set(locks)
    try:
        yield
    finally:
        _locks.reset(token)


def own_locks() -> AbstractContextManager[None]:
    """Use other locks for generators in a ``with`` block, in a thread for which a worker holds those of the process."""
    return using(_Locks())
