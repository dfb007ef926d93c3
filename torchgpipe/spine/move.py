"""Putting a pipelined module on its devices; its parameters stay the objects that they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchgpipe.devices import links
from torchgpipe.devices.device import same_memory
from torchgpipe.devices.torch_internals import is_saved
from torchgpipe.model.placement import give_memory, move_parameter
from torchgpipe.offload.verify import verify_home
from torchgpipe.processes.stand_in import StandIn
from torchgpipe.spine.settings import Settings, iterate_tensors

__all__ = ["move"]


def move(module: nn.Module, settings: Settings) -> None:
    """Move every parameter and buffer to its device, or only buffers if weights live in host memory.

    What is on the meta device gets memory there, filled with nan until weights are loaded. So a model that no single
    memory can hold comes into being in parts.

    Raises:
        ValueError: a buffer on the meta device is in no ``state_dict``, so nothing could load it.
    """
    lost = [
        full
        for full, child, name, tensor in iterate_tensors(module)
        if name in child._buffers and tensor.is_meta and not is_saved(child, name)
    ]
    if lost:
        raise ValueError(
            f"the buffers {lost} are on the meta device, and no state_dict has them, so they could not be loaded; make "
            "the model with real buffers, for instance in accelerate.init_empty_weights(), which leaves them real"
        )
    for full, child, name, tensor in [*iterate_tensors(module)]:
        if isinstance(tensor, StandIn):
            continue
        device = settings.devices[settings.column_of(full)]
        parameter = child._parameters.get(name)
        if parameter is None:
            if tensor.is_meta:
                child._buffers[name] = _unset(torch.empty_like(tensor, device=device))
            elif not same_memory(tensor.device, device):
                child._buffers[name] = links.to(tensor, device)
            continue
        if settings.offload is not None:
            verify_home([(full, parameter)])
            device = torch.device("cpu")
        if parameter.is_meta:
            give_memory(parameter, device)
            _unset(parameter)
        else:
            move_parameter(full, parameter, device)


@torch.no_grad()
def _unset(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()
