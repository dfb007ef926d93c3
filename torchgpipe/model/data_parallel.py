"""Replicas of a pipeline in other processes, under DistributedDataParallel.

Each process runs its share of a mini-batch, and DistributedDataParallel reduces the gradients. Running statistics are
exchanged here. Collectives must be called in the same order in every process. So they are called in the caller's
thread, once per call of the pipeline: the order among worker threads is undefined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchgpipe.devices.torch_internals import active_data_parallel, joins_unevenly

__all__ = ["active_process_group", "all_gather", "is_replicated", "refuse_join", "verify_layers"]


def active_process_group() -> Any:
    """Return the process group of the DistributedDataParallel whose forward is running.

    None if no forward is running, or if the group is this process alone.
    """
    ddp = active_data_parallel()
    return None if ddp is None or ddp.process_group.size() == 1 else ddp.process_group


def is_replicated() -> bool:
    """Return whether the forward of a DistributedDataParallel is running, which has hooks on all parameters."""
    return active_data_parallel() is not None


def refuse_join() -> None:
    """Raise an error if the processes may call their pipelines a different number of times.

    Raises:
        RuntimeError: the call is in ``join()``, where a process without input would not take part in an exchange.
    """
    ddp = active_data_parallel()
    if ddp is not None and joins_unevenly(ddp):
        raise RuntimeError(
            "deferred batch norms cannot run in join() of DistributedDataParallel, because a process without input "
            "would not send its statistics; give every process as many mini-batches, use "
            "join(throw_on_early_termination=True), or make the GPipe without deferred_batch_norm"
        )


def all_gather(group: Any, values: Tensor) -> list[Tensor]:
    """Return the ``values`` of all processes in the group, by rank; their shapes must be equal."""
    received = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(received, values, group=group)
    return received


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
    nn.SyncBatchNorm: (
        "BatchNorm and GPipe(..., deferred_batch_norm=True), whose running statistics are those of all processes"
    ),
    DistributedDataParallel: "it around the pipeline: DistributedDataParallel(GPipe(...))",
}
