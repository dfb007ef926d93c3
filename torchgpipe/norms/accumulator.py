"""Collect what a layer sees in a mini-batch, for a single update of its running statistics at the end."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import cast

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import BatchNormBase
from torchgpipe.norms.moments import Moments

__all__ = ["Accumulator", "accumulation_dtype", "accumulators", "is_tracking"]


class Accumulator:
    """Collect the moments of a layer, in the order of its runs.

    Args:
        norm: the layer

    Attributes:
        parts: the moments of each run
    """

    def __init__(self, norm: BatchNormBase) -> None:
        self.parts: list[Moments] = []
        self._momentum = norm.momentum
        # The buffers are looked up now. At the time of the update, a recomputation in another thread may have
        # registered scratch copies in their place.
        self._statistics = (cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var))
        self._num_batches = norm.num_batches_tracked

    def update(self, moments: Moments) -> None:
        """Update the running statistics, as a plain batch norm does after one run on all samples."""
        with _update_lock:
            factor = self._momentum or 0.0
            if self._num_batches is not None:
                self._num_batches.add_(1)
                if self._momentum is None:
                    factor = 1.0 / float(self._num_batches)
            if moments.n == 0:
                return
            for running, seen in zip(self._statistics, (moments.mean, moments.var)):
                running.copy_(seen * factor + running.to(seen.dtype) * (1 - factor))


#: Makes updates by several threads come one after the other.
_update_lock = threading.Lock()

#: The accumulators of the mini-batch in progress, by layer; None outside a mini-batch. Workers and recomputations run
#: in copies of the caller's context, so they add to the same dict.
accumulators: ContextVar[dict[BatchNormBase, Accumulator] | None] = ContextVar("torchgpipe_mini_batch", default=None)


def is_tracking(norm: BatchNormBase) -> bool:
    """Return whether a run of ``norm`` counts towards its running statistics."""
    has_statistics = norm.running_mean is not None and norm.running_var is not None
    return norm.training and norm.track_running_stats and has_statistics


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which moments of values of ``dtype`` are taken and merged: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)
