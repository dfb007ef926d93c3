"""Add up the gradients of the replicas of a pipeline over processes, each of which trains on a part of a mini-batch.

Gradients are added up once in a step, after the last cell: in buckets, which take little memory beside the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.typing import Leaf
from torchgpipe.processes.processes import Processes

__all__ = ["add_over_replicas"]

#: The bytes of gradients that are added up at once. More would take more memory, and less would cost latency.
_BUCKET = 32 * 2**20


def add_over_replicas(parameters: Sequence[Tensor], grads: list[Leaf], processes: Processes) -> list[Leaf]:
    """Return the sums of the gradients of all replicas; None where none of them has a gradient.

    Args:
        parameters: the same parameters, in the same order, in all replicas
        grads: the gradients of the parameters in this process; the list is emptied bucket by bucket, to free memory
        processes: the processes, which know those of the other replicas

    Raises:
        ValueError: a gradient is sparse, in any of the replicas.
        RuntimeError: another replica does not answer.
    """
    layouts = [[grad is not None, grad is not None and grad.layout is not torch.strided] for grad in grads]
    # Added up before anything is refused, so that all processes raise the error, and none waits for another.
    counts = torch.tensor(layouts, dtype=torch.int32)
    processes.add_replicas(counts, "the gradients of the replicas")
    used, sparse = counts.view(-1, 2).T.tolist()
    if any(sparse):
        raise ValueError("sparse gradients cannot be added up over replicas; make the layers without sparse=True")
    sums: list[Leaf] = [None] * len(parameters)
    for bucket in _buckets(parameters, [index for index, count in enumerate(used) if count]):
        flat = torch.cat([_flat(parameters[index], grads[index]) for index in bucket])
        for index in bucket:
            grads[index] = None
        processes.add_replicas(flat, "the gradients of the replicas")
        for index, part in zip(bucket, torch.split(flat, [parameters[index].numel() for index in bucket])):
            parameter = parameters[index].detach()
            sums[index] = torch.empty_like(parameter).copy_(part.view_as(parameter))
    return sums


def _buckets(parameters: Sequence[Tensor], indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of parameters of one device and one dtype, ``_BUCKET`` bytes at a time or a little more."""
    kinds: dict[Any, list[int]] = {}
    for index in indices:
        kinds.setdefault((parameters[index].device, parameters[index].dtype), []).append(index)
    for kind in kinds.values():
        bucket, size = [], 0
        for index in kind:
            bucket.append(index)
            size += parameters[index].nbytes
            if size >= _BUCKET or index == kind[-1]:
                yield bucket
                bucket, size = [], 0


def _flat(parameter: Tensor, grad: Leaf) -> Tensor:
    return (torch.zeros_like(parameter) if grad is None else grad).flatten()
