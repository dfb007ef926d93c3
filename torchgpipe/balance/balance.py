"""Balance partitions automatically, with the order of arguments that torchgpipe has had since 0.0.5."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torchgpipe_balancing
from torchgpipe.devices.typing import Device
from torchgpipe_balancing.partition import check_partitions
from torchgpipe_balancing.walk import layers_of

__all__ = ["available", "balance_by_size", "balance_by_time"]


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: Device = "cuda"
) -> list[int]:
    """Balance the time that partitions take. See :func:`torchgpipe_balancing.balance_by_time`.

    Args:
        partitions: the number of partitions
        module: the model, not yet wrapped, on any device; it is not changed
        sample: an input of the size of a micro-batch: a tensor, or a nested container of tensors; a tuple may be
            several arguments of the first layer; see :func:`torchgpipe_balancing.profile`

    Keyword Args:
        timeout: seconds after which no further round of measurements is started
        device: the device to profile layers on, one at a time; without CUDA, 'cuda' means the machine's default
            device, which may be the CPU

    Returns:
        The number of layers in each partition, for GPipe's `balance`.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``.
        ValueError: there are fewer layers than partitions, `partitions` is below 1, or `timeout` is negative.
    """
    return torchgpipe_balancing.balance_by_time(
        module, sample, partitions=partitions, device=available(device), timeout=timeout
    )


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = "cuda",
) -> list[int]:
    """Balance the memory that partitions take: activations / chunks + parameters x param_scale.

    A partition holds the activations of one micro-batch. `param_scale` is 2 for a parameter and its gradient, plus the
    number of tensors of the parameter's size that the optimizer keeps:

    ==========================================  =============  ============================
    optimizer                                   `param_scale`  what it keeps
    ==========================================  =============  ============================
    SGD                                         2              nothing
    SGD with momentum                           3              momentum_buffer
    Adam, AdamW, NAdam, RAdam                   4              exp_avg, exp_avg_sq
    Adam, AdamW with amsgrad                    5              the same, max_exp_avg_sq
    Adamax                                      4              exp_avg, exp_inf
    Adadelta                                    4              square_avg, acc_delta
    Adagrad                                     3              sum
    ASGD                                        3              ax
    Muon                                        3              momentum_buffer
    RMSprop                                     3              square_avg
    RMSprop with momentum                       4              square_avg, momentum_buffer
    RMSprop with momentum and centered          5              the same, grad_avg
    Rprop                                       4              prev, step_size
    ==========================================  =============  ============================

    ::

        balance = balance_by_size(4, model, mini_batch, chunks=8, param_scale=4)  # Adam

    Args:
        partitions: the number of partitions
        module: the model, not yet wrapped, on any device; it is not changed
        input: a mini-batch: a tensor, or a nested container of tensors; a tuple may be several arguments, as in
            :func:`balance_by_time`

    Keyword Args:
        chunks: the number of micro-batches that a mini-batch will be split into
        param_scale: the number of tensors per parameter, see above
        device: the device to profile layers on, as in :func:`balance_by_time`

    Returns:
        The number of layers in each partition, for GPipe's `balance`.

    Raises:
        TypeError: `module` is not an ``nn.Sequential``.
        ValueError: there are fewer layers than partitions, `partitions` or `chunks` is below 1, or `param_scale` is
            negative.
    """
    check_partitions(len(layers_of(module)), partitions)
    profile = torchgpipe_balancing.profile(module, input, device=available(device), timeout=0)
    return profile.balance(partitions, by="size", chunks=chunks, param_scale=param_scale)


def available(device: Device) -> Device | None:
    """Return ``device``, or None for the machine's default device if ``device`` is CUDA and there is none."""
    return None if str(device) == "cuda" and not torch.cuda.is_available() else device
