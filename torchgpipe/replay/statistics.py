"""Count a micro-batch once in running statistics, though a checkpointed pipeline runs its layers twice.

In training, a batch norm updates its running statistics in place at every run. In a recomputation it updates copies
instead (`scratch_statistics`). Restoring the old values afterwards would be wrong, because the recomputed graph may
hold the same tensors. Another thread that runs the same layers forward must not find the copies. So these layers run in
one thread at a time (`exclusive`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from torchgpipe.devices.torch_internals import BatchNormBase

__all__ = ["STATISTICS", "Norm", "exclusive", "scratch_statistics"]

#: The layers that keep running statistics; users' own subclasses are included. Lazy ones change their class later.
Norm = (
    BatchNormBase,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
)

#: The buffers that these layers update.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def scratch_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Let ``norms`` update copies of their statistics for a ``with`` block."""
    kept: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    try:
        for norm in norms:
            for name in STATISTICS:
                statistic = norm._buffers.get(name)
                if statistic is not None:
                    kept.append((norm._buffers, name, statistic))
                    norm._buffers[name] = statistic.clone()
        yield
    finally:
        for buffers, name, statistic in kept:
            buffers[name] = statistic


#: Kept beside the modules, because a lock in a module could not be copied or pickled.
_locks: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
_locks_lock = threading.Lock()

#: The norms that this thread, or the thread that it works for, has locked.
_held: ContextVar[frozenset[nn.Module]] = ContextVar("torchgpipe_held_norms", default=frozenset())


@contextmanager
def exclusive(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Keep other threads from running ``norms`` for a ``with`` block.

    Workers of a pipeline within the block run in a copy of its context, so they may run ``norms``.
    """
    held = _held.get()
    wanted = {norm for norm in norms if norm not in held}
    with _locks_lock:
        locks = [_locks.setdefault(norm, threading.Lock()) for norm in sorted(wanted, key=id)]
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        token = _held.set(held | wanted)
        try:
            yield
        finally:
            _held.reset(token)
