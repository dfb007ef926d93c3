"""The tensors among the attributes of a parameter, such as the scales of a quantised weight, which follow it.

The object that holds them may be known to the parameter's module as well. So a parameter that moves keeps the object,
which gets the tensors on the other device. An alias of a parameter gets copies of such objects: those of the parameter
keep theirs in host memory. An attribute that leads to a module or to another parameter, such as an optimizer, is no
part of this parameter, and stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices import links
from torchgpipe.devices.device import same_memory
from torchgpipe.devices.torch_internals import is_wrapper
from torchgpipe.model.values import is_plain_object

__all__ = ["attributes_with", "has_memory_of", "move_attached", "with_attached"]


def move_attached(parameter: nn.Parameter, device: torch.device) -> None:
    """Move the tensors among the attributes of a parameter, and in the objects and containers there, to ``device``."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor if same_memory(tensor.device, device) else links.to(tensor, device)

    for name, found in _parts(parameter):
        if found:
            vars(parameter)[name] = _exchanged(vars(parameter)[name], moved, {})


def with_attached(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield parameters, each frozen one with the tensors among its attributes that have memory of their own."""
    for parameter in parameters:
        yield parameter
        attached = [] if parameter.requires_grad else [tensor for _, found in _parts(parameter) for tensor in found]
        yield from {tensor: None for tensor in attached if not has_memory_of(tensor, parameter)}


def attributes_with(parameter: Tensor, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the attributes of a parameter with other tensors, in copies of the objects and containers there.

    Args:
        parameter: the parameter
        change: maps tensors
    """
    attributes, known = dict(vars(parameter)), dict[int, Any]()
    for name, found in _parts(parameter):
        if found:
            attributes[name] = _exchanged(attributes[name], change, known, copies=True)
    return attributes


def has_memory_of(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor among the attributes of a parameter has the very memory of that parameter."""
    if not tensor.layout is parameter.layout is torch.strided or tensor.dtype is not parameter.dtype:
        return False
    ours, theirs = [(one.shape, one.stride(), one.data_ptr()) for one in (tensor, parameter)]
    return ours == theirs


def _parts(parameter: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the name of each attribute that is a part of a parameter, and the tensors in it."""
    attributes, found = vars(parameter), list[Any]()

    def note(item: Any) -> Any:
        found.append(item)
        return item

    # The attributes of a tensor that wraps others are its values.
    for name in [] if is_wrapper(parameter) else [*attributes]:
        found.clear()
        _exchanged(attributes[name], note, {id(attributes): attributes})
        if not any([isinstance(item, (nn.Parameter, nn.Module)) for item in found]):
            yield name, [*found]


def _exchanged(value: Any, change: Callable[[Any], Any], known: dict[int, Any], *, copies: bool = False) -> Any:
    """Return a value with other tensors in it.

    Args:
        value: the value
        change: maps tensors and modules
        known: by the id of an object or container that was visited: what stands for it
        copies: whether copies of objects and containers hold the other tensors, and not these themselves
    """
    kind: Any = type(value)
    if isinstance(value, (Tensor, nn.Module)):
        return change(value)
    if kind is tuple:
        items = tuple([_exchanged(item, change, known, copies=copies) for item in value])
        return value if all([a is b for a, b in zip(items, value)]) else items
    if id(value) in known or not (isinstance(value, (list, dict)) or is_plain_object(value)):
        return known.get(id(value), value)
    holder = known[id(value)] = copy.copy(value) if copies else value
    is_container = isinstance(value, (list, dict))
    read: Any = kind.__getitem__ if is_container else getattr
    put: Any = kind.__setitem__ if is_container else object.__setattr__
    keys: Any = range(len(value)) if isinstance(value, list) else [*value] if is_container else _names_of(value)
    for key in keys:
        item = read(holder, key)
        new = _exchanged(item, change, known, copies=copies)
        if new is not item:
            put(holder, key, new)
    return holder


def _names_of(value: Any) -> list[str]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for known in slots for name in ((known,) if isinstance(known, str) else known)]
    return [*getattr(value, "__dict__", {}), *[name for name in names if hasattr(value, name)]]
