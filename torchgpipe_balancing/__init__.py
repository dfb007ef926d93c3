"""Proposes how to split a model over the partitions of a pipeline. ::

    from torchgpipe import GPipe
    from torchgpipe_balancing import balance_by_time

    balance = balance_by_time(model, sample, partitions=2)
    model = GPipe(model, balance, chunks=8)

Time is what a pipeline waits for; memory is what a device runs out of; parameters need nothing to be run.
Whichever is balanced, the split is the best there is for what was measured. To see what was measured, or to
keep time balanced within the devices' memory, ask for the profile::

    profile = torchgpipe_balancing.profile(model, sample)
    print(profile)
    balance = profile.balance(2, by="time")

This package stands beside `torchgpipe`, and knows of it only how skips are stashed and popped.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from torchgpipe_balancing.measure import Device, profile, profile_sizes
from torchgpipe_balancing.partition import check_partitions, partition
from torchgpipe_balancing.profiles import LayerProfile, Profile
from torchgpipe_balancing.sizes import footprints
from torchgpipe_balancing.walk import layers_of

__all__ = [
    "LayerProfile",
    "Profile",
    "Report",
    "balance_by_parameters",
    "balance_by_size",
    "balance_by_time",
    "partition",
    "profile",
]

#: The former name of :class:`Profile`; a report is what a timeline gives.
Report = Profile


def balance_by_time(
    module: nn.Sequential,
    sample: Any,
    *,
    partitions: int = 1,
    device: Device = None,
    timeout: float = 1.0,
) -> list[int]:
    """Balances the time that the partitions take for forward, recomputation and backward.

    The model is profiled in training mode; see :func:`profile`, which also shows the times. The time that
    counts includes one recomputation, as in GPipe's default ``checkpoint='except_last'``. For a model that
    runs with ``checkpoint='never'``, use ``profile(...).balance(partitions, recompute=False)``.

    Args:
        module: the model, not yet wrapped
        sample: an input of the size of a micro-batch: a tensor, or a nested container of tensors; a tuple may be
            several arguments of the first layer, see :func:`profile`

    Keyword Args:
        partitions: how many partitions
        device: where layers are profiled, one at a time (default: the accelerator that the module or the
            sample is on, else the machine's accelerator, else the CPU)
        timeout: seconds after which no further round of measurements is started

    Returns:
        The number of layers in each partition, GPipe's `balance`.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``
        ValueError: fewer layers than partitions, or partitions below 1

    """
    check_partitions(len(layers_of(module)), partitions)
    return profile(module, sample, device=device, timeout=timeout).balance(partitions, by="time")


def balance_by_size(
    module: nn.Sequential,
    sample: Any,
    *,
    partitions: int = 1,
    device: Device = None,
) -> list[int]:
    """Balances the memory that the partitions take: activations kept for backward, and parameters twice.

    Twice, because every parameter gets a gradient. :func:`torchgpipe.balance.balance_by_size` also takes the
    number of micro-batches and the optimizer's state into account.

    Args:
        module: the model, not yet wrapped
        sample: an input of the size of a micro-batch: a tensor, or a nested container of tensors; a tuple may be
            several arguments of the first layer, see :func:`profile`

    Keyword Args:
        partitions: how many partitions
        device: where layers are profiled, one at a time (default: as in :func:`balance_by_time`); sizes are
            counted, not measured, and are the same on every device that saves the same tensors

    Returns:
        The number of layers in each partition, GPipe's `balance`.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``
        ValueError: fewer layers than partitions, or partitions below 1

    """
    check_partitions(len(layers_of(module)), partitions)
    return partition(footprints(profile_sizes(module, sample, device=device)), partitions)


def balance_by_parameters(module: nn.Sequential, *, partitions: int) -> list[int]:
    """Balances the number of parameters, without running the model; it may be on the meta device. ::

        balance = balance_by_parameters(model, partitions=2)

    Args:
        module: the model, not yet wrapped

    Keyword Args:
        partitions: how many partitions

    Returns:
        The number of layers in each partition, GPipe's `balance`.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``
        ValueError: fewer layers than partitions, or partitions below 1

    """
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(module).values()]
    return partition(counts, partitions)
