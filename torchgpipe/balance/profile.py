"""Profile the layers of a model; torchgpipe 0.0.5 to 0.0.7 had these functions here.

Times are medians over all rounds within the timeout; the original's are sums. Sizes are counted and not measured, so
they work on the CPU as well.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import torchgpipe_balancing
from torchgpipe.balance.balance import available
from torchgpipe.devices.typing import Device

__all__ = ["profile_sizes", "profile_times"]


def profile_times(module: nn.Sequential, sample: Any, timeout: float, device: Device) -> list[int]:
    """Return the time that each layer takes for forward and backward, in microseconds.

    Args:
        module: the model, not yet wrapped
        sample: an input, as in :func:`torchgpipe_balancing.profile`
        timeout: seconds after which no further round is started
        device: the device to profile layers on

    Raises:
        TypeError, ValueError: as in :func:`torchgpipe_balancing.profile`
    """
    profile = torchgpipe_balancing.profile(module, sample, device=available(device), timeout=timeout)
    return [round(layer.times.total(recompute=False) * 1_000_000) for layer in profile.layers]


def profile_sizes(module: nn.Sequential, input: Any, chunks: int, param_scale: float, device: Device) -> list[int]:
    """Return the memory that each layer takes, in bytes: activations / chunks + parameters x param_scale.

    Args:
        module: the model, not yet wrapped
        input: a mini-batch
        chunks: the number of micro-batches that a mini-batch will be split into
        param_scale: the number of tensors per parameter; see :func:`torchgpipe.balance.balance_by_size`
        device: the device to profile layers on

    Raises:
        TypeError, ValueError: as in :func:`torchgpipe.balance.balance_by_size`
    """
    profile = torchgpipe_balancing.profile(module, input, device=available(device), timeout=0)
    return [round(size) for size in profile.costs("size", chunks=chunks, param_scale=param_scale)]
