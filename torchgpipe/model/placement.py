"""Put partitions on their devices, from other devices and from the meta device, which has no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices import links
from torchgpipe.devices.device import same_memory
from torchgpipe.devices.torch_internals import can_move_data, exchange_memory
from torchgpipe.model.attached import move_attached
from torchgpipe.model.partition import Partition

__all__ = ["give_memory", "move_buffers", "move_parameter", "place", "verify_sharing"]


def place(partitions: Sequence[Partition], devices: Sequence[torch.device], *, offload: bool = False) -> None:
    """Move every partition to its device, and materialise there what is on the meta device.

    Args:
        partitions: the partitions
        devices: the device of each partition
        offload: whether parameters stay in host memory, and only buffers are moved

    Raises:
        ValueError: a parameter would have to be on two devices, a layer on the meta device cannot be materialised, or a
            layer is a pipeline on other devices.
    """
    if not offload:
        verify_sharing(partitions, devices)
    _verify_pipelines(partitions, devices)
    on_meta = _verify_meta(partitions)
    for partition, device in zip(partitions, devices):
        _materialise(partition, torch.device("cpu") if offload else device)
        for module in _children_first(partition):
            if module in on_meta:
                on_meta[module]()
        if offload:
            move_buffers(partition, device)
        elif not all(same_memory(tensor.device, device) for tensor in (*partition.parameters(), *partition.buffers())):
            for name, parameter in partition.named_parameters():
                move_parameter(name, parameter, device)
            partition.to(device)  # Buffers, and what layers do when they are moved.


def verify_sharing(partitions: Sequence[Partition], places: Sequence[object]) -> None:
    """Raise an error if partitions in different places share a parameter or a buffer.

    Args:
        partitions: the partitions
        places: the device or the process of each partition

    Raises:
        ValueError: the names of the shared parameters, with their places.
    """
    owners: dict[torch.Tensor, tuple[str, object]] = {}
    shared = []
    for j, (partition, place) in enumerate(zip(partitions, places)):
        for name, parameter in (*partition.named_parameters(), *partition.named_buffers()):
            owner = f"'{name}' (partition {j} on {place})"
            first_owner, first_place = owners.setdefault(parameter, (owner, place))
            if first_place != place:
                shared.append(f"{first_owner} is also {owner}")
    if shared:
        raise ValueError(
            f"module with duplicate parameters in distinct children is not supported: {'; '.join(shared)}; a "
            "parameter lives on one device, so choose a balance or devices that keep its layers together"
        )


def _verify_pipelines(partitions: Sequence[Partition], devices: Sequence[torch.device]) -> None:
    """Raise an error if a layer is a pipeline on accelerators other than its partition's.

    It could not be moved to the partition's device. And it draws from generators that this pipeline does not look at
    in front of a cell, so a recomputation would draw other numbers.
    """
    for partition, device in zip(partitions, devices):
        for name, module in partition.named_modules():
            inner: Sequence[torch.device] = getattr(module, "_pipeline_devices", ())
            if not all([same_memory(known, device) for known in inner]):
                inner_devices = ", ".join(map(str, dict.fromkeys(inner)))
                raise ValueError(
                    f"'{name}' ({type(module).__name__}) is a pipeline on {inner_devices} in partition "
                    f"{partition._index} on {device}; a pipeline inside of another has to be on the device of its "
                    "partition, or all of them on the CPU: unwrap it (unwrap() or unpipelined()), and give its layers "
                    "to the outer pipeline"
                )


def _verify_meta(partitions: Sequence[Partition]) -> dict[nn.Module, Callable[[], None]]:
    """Return the modules that hold tensors on the meta device, each with the method that initialises it.

    Raises:
        ValueError: a module has no such method, shares tensors, or has a parameter that cannot be given memory.
    """
    known: set[torch.Tensor] = set()
    result = {}
    for partition in partitions:
        for name, module in partition.named_modules():
            tensors = [*module._parameters.values(), *module._buffers.values()]
            on_meta = [tensor for tensor in tensors if tensor is not None and tensor.is_meta]
            if not on_meta:
                continue
            initialise = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if initialise is None or not known.isdisjoint(on_meta):
                reason = "has no reset_parameters() to initialise itself with" if initialise is None else "is shared"
                raise ValueError(
                    f"'{name}' ({type(module).__name__}) is on the meta device and {reason}; materialise the "
                    "module and load its weights before wrapping it"
                )
            for attribute, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and weakref.getweakrefs(parameter):
                    raise _not_materialisable(f"{name}.{attribute}", "there is a weak reference to it")
            known.update(on_meta)
            result[module] = initialise
    return result


def _materialise(partition: Partition, device: torch.device) -> None:
    """Give memory to the tensors on the meta device, and leave all others alone.

    Parameters stay the same objects, so that an optimizer that was made before trains them.
    """
    for name, module in partition.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                try:
                    give_memory(parameter, device)
                except RuntimeError as error:
                    raise _not_materialisable(f"{name}.{attribute}", str(error)) from error
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[attribute] = torch.empty_like(buffer, device=device)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module to ``device``, and leave its parameters where they are."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and not same_memory(buffer.device, device):
                child._buffers[name] = links.to(buffer, device)


@torch.no_grad()
def move_parameter(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter, its gradient and the tensors among its attributes to ``device``.

    The parameter stays the same object, with its class and hooks.

    Raises:
        ValueError: something refers to the parameter, on a backend where parameters cannot change their device.
    """
    if is_lazy(parameter):
        return
    move_attached(parameter, device)
    if same_memory(parameter.device, device):
        return
    moved, grad = links.to(parameter.detach(), device), parameter.grad
    if can_move_data(parameter, device):
        parameter.data = moved
        if grad is not None:
            grad.data = links.to(grad.detach(), device)
        return
    parameter.grad = None  # It refers to the parameter's memory.
    try:
        _exchange(parameter, moved)
    except RuntimeError as error:
        parameter.grad = grad
        raise ValueError(
            f"parameter '{name}' cannot be moved from {parameter.device} to {device} as the same object, which an "
            f"optimizer may have: {error}; wrap the module before what refers to its parameters is made, or move its "
            "parts to their devices yourself before wrapping it"
        ) from error
    if grad is not None:
        parameter.grad = links.to(grad, device)


def give_memory(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter memory on ``device``, and keep its class, attributes and hooks.

    Raises:
        RuntimeError: the parameter is referred to weakly or by another tensor, so that PyTorch cannot swap it.
    """
    _exchange(parameter, torch.empty_like(parameter, device=device))


def _exchange(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    real = nn.Parameter(memory, parameter.requires_grad)
    # Class and attributes are exchanged as well. Without these copies they would go with the old memory.
    real.__class__ = type(parameter)
    vars(real).update({name: value for name, value in vars(parameter).items() if name not in vars(real)})
    exchange_memory(parameter, real)


def _not_materialisable(name: str, reason: str) -> ValueError:
    return ValueError(
        f"parameter '{name}' is on the meta device and cannot be given memory as the same object: {reason}; wrap the "
        "module before what refers to its parameters is made (an optimizer may be made before), or materialise the "
        "module and load its weights before wrapping it"
    )


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules in the order in which constructors initialise them."""
    for child in module.children():
        yield from _children_first(child)
    yield module
