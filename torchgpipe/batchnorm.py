"""Normalisation layers count every micro-batch once, though a checkpointed cell runs twice.

In training, a batch norm updates its running statistics in place at every run. In a recomputation it is given
copies of them to update instead. (Putting the old values back afterwards would not do: the recomputed graph
may hold the very same tensors.)

Meanwhile another thread may want to run the same layers forward, and must not find the copies. So the layers of a
partition with such norms run in one thread at a time (`statistics_lock`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import Tensor, nn

__all__ = ["Norm", "scratch_statistics", "statistics_lock"]

#: The layers that keep running statistics. Subclasses, also the users' own, are among them.
Norm = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

#: Kept beside the modules, which are copied and pickled.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()


def statistics_lock(norm: nn.Module) -> threading.RLock:
    """The lock of the layers that have ``norm`` as their first one."""
    with _locks_lock:
        return _locks.setdefault(norm, threading.RLock())


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def scratch_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Lets ``norms`` update copies of their statistics for a ``with`` block."""
    kept: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    try:
        for norm in norms:
            for name in _STATISTICS:
                statistic = norm._buffers.get(name)
                if statistic is not None:
                    kept.append((norm._buffers, name, statistic))
                    norm._buffers[name] = statistic.clone()
        yield
    finally:
        for buffers, name, statistic in kept:
            buffers[name] = statistic
