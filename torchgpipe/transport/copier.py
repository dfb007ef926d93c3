"""Copying to a device in the thread that needs the tensor, without streams of its own: what no cell has computed."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from torchgpipe.devices.stream import Streams

__all__ = ["copier"]


def copier(
    streams: Streams, device: torch.device, sources: Container[torch.device] | None = None
) -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor to ``device``, unless it is in that memory.

    Args:
        streams: tells what must be copied
        device: the device
        sources: the devices from which tensors are copied; None for all
    """

    def copied(tensor: Tensor) -> Tensor:
        source = streams.device_of(tensor)
        if source is None or (sources is not None and source not in sources) or not streams.moves(source, device):
            return tensor
        copy = tensor.to(device)
        # Under no_grad() a model may turn gradients on and differentiate its input, which has to be a leaf then.
        return copy if copy.requires_grad == tensor.requires_grad else copy.requires_grad_()

    return copied
