"""Running statistics count a micro-batch once, though a checkpointed pipeline runs its layers twice.

In training, a batch norm updates its running statistics in place at every run. In a recomputation it is given copies
of them to update instead (`scratch_statistics`). Putting the old values back afterwards would not do: the recomputed
graph may hold the very same tensors. Meanwhile another thread may want to run the same layers forward, and must not
find the copies. So they run in one thread at a time (`exclusive`).
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

#: The layers that keep running statistics. Subclasses, also the users' own, are among them.
Norm = (
    BatchNormBase,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

#: The buffers that those update.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def scratch_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Lets ``norms`` update copies of their statistics for a ``with`` block."""
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


#: Kept beside the modules, which are copied and pickled.
_locks: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
_locks_lock = threading.Lock()

#: The norms that this thread, or the one that it works for, has for itself.
_held: ContextVar[frozenset[nn.Module]] = ContextVar("_held", default=frozenset())


@contextmanager
def exclusive(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Keeps other threads from running ``norms`` for a ``with`` block.

    The workers of a pipeline inside it have its context, and may.
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
