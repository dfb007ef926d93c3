"""Propose how to split a model over the partitions of a pipeline. ::

    from torchgpipe import GPipe
    from torchgpipe_balancing import balance_by_time

    balance = balance_by_time(model, sample, partitions=2)
    model = GPipe(model, balance, chunks=8)

Balance by time to make the pipeline fast, by size to fit the model into the devices' memory, or by parameters to run
nothing beforehand. Each split is the best one for the costs that were measured. To see these costs, or to balance by
time within the memory of the devices, ask for the profile::

    profile = torchgpipe_balancing.profile(model, sample)
    print(profile)
    balance = profile.balance(2, by="time")

:func:`torchgpipe.plan` decides on all of it at once: the balance, the number of micro-batches, the schedule, and the
layers to recompute.

This package stands beside `torchgpipe` and imports only its rooms `devices` and `skip`. Its room `planning`, which is
imported by those who ask for it, uses all of `torchgpipe`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from torchgpipe.devices.typing import Device
from torchgpipe_balancing.measure import profile
from torchgpipe_balancing.partition import check_partitions, partition
from torchgpipe_balancing.profiles import LayerProfile, Profile
from torchgpipe_balancing.walk import layers_of

if TYPE_CHECKING:
    from torchgpipe_balancing.planning.check import Check
    from torchgpipe_balancing.planning.plan import DoesNotFit
    from torchgpipe_balancing.planning.result import Plan

__all__ = [
    "Check",
    "DoesNotFit",
    "LayerProfile",
    "Plan",
    "Profile",
    "Report",
    "balance_by_parameters",
    "balance_by_size",
    "balance_by_time",
    "partition",
    "profile",
]

#: The former name of :class:`Profile`. The class `Report` of a timeline is another one.
Report = Profile


def __getattr__(name: str) -> Any:
    if name in ("Check", "DoesNotFit", "Plan"):  # They import the engine.
        from torchgpipe_balancing.planning import plan as home

        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def balance_by_time(
    module: nn.Sequential, sample: Any, *, partitions: int = 1, device: Device | None = None, timeout: float = 1.0
) -> list[int]:
    """Balance the time that the partitions take for forward, recomputation and backward.

    The model is profiled in training mode; :func:`profile` also shows the times. The balanced time includes one
    recomputation, as in GPipe's default ``checkpoint='except_last'``. For a model that runs with
    ``checkpoint='never'``, use ``profile(...).balance(partitions, recompute=False)``.

    Args:
        module: the model, not yet wrapped
        sample: an input of the size of a micro-batch: a tensor, or a nested container of tensors; a tuple may be
            several arguments of the first layer; see :func:`profile`

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
    module: nn.Sequential, sample: Any, *, partitions: int = 1, device: Device | None = None
) -> list[int]:
    """Balance the memory that the partitions take: activations kept for backward, and parameters twice.

    Parameters count twice because every parameter gets a gradient. :func:`torchgpipe.balance.balance_by_size` also
    takes the number of micro-batches and the optimizer's state into account.

    Args:
        module: the model, not yet wrapped
        sample: an input of the size of a micro-batch: a tensor, or a nested container of tensors; a tuple may be
            several arguments of the first layer; see :func:`profile`

    Keyword Args:
        partitions: how many partitions
        device: where layers are profiled, one at a time (default: as in :func:`balance_by_time`); sizes are
            counted, not measured, so all devices that save the same tensors give the same sizes

    Returns:
        The number of layers in each partition, GPipe's `balance`.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``
        ValueError: fewer layers than partitions, or partitions below 1

    """
    check_partitions(len(layers_of(module)), partitions)
    return profile(module, sample, device=device, timeout=0).balance(partitions, by="size")


def balance_by_parameters(module: nn.Sequential, *, partitions: int) -> list[int]:
    """Balance the number of parameters without running the model, which may be on the meta device. ::

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
