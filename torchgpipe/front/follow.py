"""Adapters in a network of their own, such as the LoRA of kohya's scripts: each goes to the device of its layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from torchgpipe.devices.torch_internals import forward_hooks
from torchgpipe.front.pipelined_module import runs_of
from torchgpipe.gpipe import GPipe
from torchgpipe.model.placement import move_buffers, move_parameter

__all__ = ["follow"]

N = TypeVar("N", bound=nn.Module)


def follow(network: N, model: nn.Module) -> N:
    """Move each adapter of a network to the device of the layer that calls it. ::

        class Adapter(nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.scale, self.original = nn.Parameter(torch.ones(8)), layer.forward
                layer.forward = lambda x: self.original(x) * self.scale

        transformer = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).requires_grad_(False)
        network = nn.ModuleList(map(Adapter, transformer))
        torchgpipe.pipelined(transformer, torch.randn(2, 8), chunks=4)
        torchgpipe.follow(network, transformer)  # before or after its optimizer is made

    The adapter takes the place of the layer's ``forward``, or is called by a hook of the layer. Parameters stay the
    same objects.

    Args:
        network: the adapters, which are no modules of the model
        model: the model, in a :class:`GPipe` or pipelined by :func:`pipelined`

    Returns:
        ``network``

    Raises:
        TypeError: the network is no module, or the model is no pipeline.
        ValueError: nothing calls a part of the network that has parameters, or layers on several devices call it.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"follow takes a network of adapters, which is an nn.Module, but got {network!r}")
    inside = {module: name for name, module in network.named_modules()}
    places: dict[nn.Module, torch.device] = {}
    for layer, device in _places_of(model):
        for adapter in _called_by(layer):
            if adapter in inside and places.setdefault(adapter, device) != device:
                raise ValueError(
                    f"'{inside[adapter]}' of the network is called by layers on {places[adapter]} and on {device}; "
                    "give each an adapter of its own, or a balance that keeps them on one device"
                )
    found = {inner for adapter in places for inner in adapter.modules()}
    lost = [name for module, name in inside.items() if module not in found and module._parameters]
    if lost:
        raise ValueError(
            f"no layer of the model calls {lost}; put the network into the model first, as by network.apply_to(), or "
            "move these modules yourself"
        )
    for adapter, device in places.items():
        for name, parameter in adapter.named_parameters():
            move_parameter(name, parameter, device)
        move_buffers(adapter, device)
    return network


def _places_of(model: nn.Module) -> Iterator[tuple[nn.Module, torch.device]]:
    """Yield the modules of a pipeline, each with the device that it computes on."""
    runs = runs_of(model)
    if runs is not None:
        for name, module in model.named_modules():
            yield module, runs.settings.devices[runs.settings.column_of(name)]
    elif isinstance(model, GPipe):
        for partition, device in zip(model.partitions, model.devices):
            for module in partition.modules():
                yield module, device
    else:
        raise TypeError(f"follow takes a GPipe or a pipelined model, but got {type(model).__name__}")


def _called_by(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that take the place of a layer's forward, or that its hooks call."""
    before, after = forward_hooks(layer)
    functions = [vars(layer).get("forward"), *before.values(), *after.values()]
    pending: list[Any] = [function for function in functions if function is not None]
    while pending:
        function = pending.pop()
        if isinstance(function, partial):
            pending += [function.func, *function.args]
            continue
        cells = getattr(function, "__closure__", None) or ()
        for value in (function, getattr(function, "__self__", None), *[cell.cell_contents for cell in cells]):
            if isinstance(value, nn.Module):
                yield value
