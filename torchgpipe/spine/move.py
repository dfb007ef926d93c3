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
    for name in lost:
        path, _, _ = name.rpartition(".")
        _compute_buffers(module, module.get_submodule(path), settings.devices[settings.column_of(name)])
    lost = [name for name in lost if not _has_values(module.get_buffer(name))]
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


def _compute_buffers(module: nn.Module, child: nn.Module, device: torch.device) -> None:
    """Let a model of transformers compute the buffers of a module without weights, such as rotary frequencies."""
    initialize = getattr(module, "_init_weights", None)
    if initialize is None or child._parameters:
        return
    for name, buffer in child._buffers.items():
        if buffer is not None and buffer.is_meta:
            child._buffers[name] = _unset(torch.empty_like(buffer, device=device))
    initialize(child)


def _has_values(buffer: Tensor) -> bool:
    """Return whether what was filled with nan has been computed since; of integers, nobody can tell."""
    return not buffer.is_meta and buffer.is_floating_point() and not buffer.isnan().any()


@torch.no_grad()
def _unset(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()
