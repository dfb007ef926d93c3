"""The costs of the layers of a model, where torchgpipe 0.0.5 to 0.0.7 had them.

Of the rounds that the timeout leaves room for it is the median that counts, not the sum. The sizes are counted and
not measured, on the CPU too.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import torchgpipe_balancing
from torchgpipe.balance.balance import available
from torchgpipe.devices.typing import Device
from torchgpipe_balancing.measure import profile_sizes as sizes_of
from torchgpipe_balancing.sizes import footprints

__all__ = ["profile_sizes", "profile_times"]


def profile_times(module: nn.Sequential, sample: Any, timeout: float, device: Device) -> list[int]:
    """Return the time that each layer takes for forward and backward, in microseconds.

    Args:
        module: the model, not yet wrapped
        sample: an input, as in :func:`torchgpipe_balancing.profile`
        timeout: seconds after which no further round is started
        device: where layers are profiled

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
        chunks: into how many micro-batches the mini-batch will be split
        param_scale: how many times parameters are held; see :func:`torchgpipe.balance.balance_by_size`
        device: where layers are profiled

    Raises:
        TypeError, ValueError: as in :func:`torchgpipe.balance.balance_by_size`
    """
    sizes = sizes_of(module, input, device=available(device))
    return [round(size) for size in footprints(sizes, chunks=chunks, param_scale=param_scale)]
