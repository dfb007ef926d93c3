"""Merge the moments of all processes that run the same layers, before the running statistics are updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchgpipe.model.data_parallel import all_gather
from torchgpipe.norms.accumulator import Accumulator
from torchgpipe.norms.moments import Moments, merge

__all__ = ["synchronize"]


def synchronize(group: Any, accumulators: Sequence[Accumulator]) -> None:
    """Replace the k-th moments of each accumulator by the k-th moments of all processes, merged.

    Nearly always each layer has one. But a layer may have run several times, or in some processes only, and no process
    knows the numbers of the others in advance. Collectives need the same shape everywhere, so each round sends::

        number of moments, of each layer │ n, of each layer │ mean and var of each layer, one after the other

    with zeros in the place of moments that a layer does not have. The first round tells how many rounds there are.

    Args:
        group: the processes
        accumulators: those of the same layers, in the same order in every process
    """
    count = len(accumulators)
    device = accumulators[0].empty.mean.device
    merged: list[list[Moments]] = [[] for _ in accumulators]
    k, rounds = 0, 1
    while k < rounds:
        mine = [each.parts[k] if k < len(each.parts) else each.empty for each in accumulators]
        head = torch.tensor([len(each.parts) for each in accumulators] + [moments.n for moments in mine])
        body = [statistic for moments in mine for statistic in (moments.mean, moments.var)]
        received = all_gather(group, torch.cat([part.to(device, torch.float64) for part in (head, *body)]))
        # Merging needs the sizes as Python numbers. This is the only time that the host waits for the device.
        heads = torch.stack([values[: len(head)] for values in received]).long().tolist()
        bodies = [torch.split(values[len(head) :], [len(part) for part in body]) for values in received]
        for index, moments in enumerate(mine):
            parts = [
                Moments(sizes[count + index], *statistics[2 * index : 2 * index + 2]).to(moments.mean)
                for sizes, statistics in zip(heads, bodies)
                if k < sizes[index]
            ]
            if parts:
                merged[index].append(merge(parts))
        k, rounds = k + 1, max(max(sizes[:count]) for sizes in heads)
    for each, parts in zip(accumulators, merged):
        each.parts = parts
