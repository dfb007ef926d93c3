"""Layers that exchange something with other processes, in a pipeline with several threads.

Collectives must be called in the same order in every process, and the order among worker threads is undefined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["verify_layers"]


def verify_layers(modules: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
    """Raise an error if layers would call collectives from several threads at once.

    Raises:
        ValueError: there is a :class:`~torch.nn.SyncBatchNorm` or a layer in
            :class:`~torch.nn.parallel.DistributedDataParallel`, and there are several devices and processes.
    """
    if len(set(devices)) == 1 or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    for module in modules:
        for kind, remedy in _REMEDIES.items():
            if isinstance(module, kind):
                raise ValueError(
                    f"{kind.__name__} cannot run in a pipeline on {len(set(devices))} devices: each device has a "
                    "thread, so the order of collectives would differ between processes, which would wait for each "
                    f"other for ever; use {remedy}"
                )


_REMEDIES: dict[type[nn.Module], str] = {
    nn.SyncBatchNorm: "BatchNorm, whose statistics are those of the process, and GPipe(..., deferred_batch_norm=True)",
    DistributedDataParallel: "it around the pipeline: DistributedDataParallel(GPipe(...))",
}
