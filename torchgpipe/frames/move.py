"""Putting a pipelined module on its devices; its parameters stay the objects that they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchgpipe.devices.device import same_memory
from torchgpipe.devices.torch_internals import is_saved
from torchgpipe.engine.host_memory import verify_home
from torchgpipe.frames.settings import Settings
from torchgpipe.model.placement import give_memory, move_parameter
from torchgpipe.model.values import dotted

__all__ = ["move"]


def move(module: nn.Module, settings: Settings) -> None:
    """Move every parameter and buffer to its device, or only buffers if weights live in host memory.

    What is on the meta device gets memory there, filled with nan until weights are loaded. So a model that no single
    memory can hold comes into being in parts.

    Raises:
        ValueError: a buffer on the meta device is in no ``state_dict``, so nothing could load it.
    """
    lost = [
        dotted(prefix, name)
        for prefix, child in module.named_modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and buffer.is_meta and not is_saved(child, name)
    ]
    if lost:
        raise ValueError(
            f"the buffers {lost} are on the meta device, and no state_dict has them, so they could not be loaded; make "
            "the model with real buffers, for instance in accelerate.init_empty_weights(), which leaves them real"
        )
    for prefix, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                full = dotted(prefix, name)
                if settings.offload is not None:
                    verify_home([(full, parameter)])
                    device = torch.device("cpu")
                else:
                    device = settings.devices[settings.column_of(full)]
                _move(full, parameter, device)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                device = settings.devices[settings.column_of(dotted(prefix, name))]
                if buffer.is_meta:
                    child._buffers[name] = _unset(torch.empty_like(buffer, device=device))
                elif not same_memory(buffer.device, device):
                    child._buffers[name] = buffer.to(device)


def _move(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    if parameter.is_meta:
        give_memory(parameter, device)
        _unset(parameter)
    else:
        move_parameter(name, parameter, device)


@torch.no_grad()
def _unset(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()
