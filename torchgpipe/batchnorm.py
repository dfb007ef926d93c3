"""Normalisation layers count every micro-batch once, though a checkpointed cell runs twice.

In training, a batch norm updates its running statistics in place at every run. In a recomputation it is given
copies of them to update instead. (Putting the old values back afterwards would not do: the recomputed graph
may hold the very same tensors.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["Norm", "scratch_statistics"]

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

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@contextmanager
def scratch_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Lets ``norms`` update copies of their statistics for a ``with`` block."""
    kept: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    try:
        for norm in norms:
            if norm.training:
                kept.append((norm, norm._buffers.copy()))
                for name in _STATISTICS:
                    statistic = norm._buffers.get(name)
                    if statistic is not None:
                        norm._buffers[name] = statistic.clone()
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update({name: buffers[name] for name in _STATISTICS if name in buffers})
