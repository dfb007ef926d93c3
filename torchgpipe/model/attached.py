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
    for holder, key in [place for _, found in _found(parameter) for place in found]:
        if not same_memory(holder[key].device, device):
            holder[key] = links.to(holder[key], device)


def with_attached(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield parameters, each frozen one with the tensors among its attributes that have memory of their own."""
    for parameter in parameters:
        yield parameter
        places = [] if parameter.requires_grad else [place for _, found in _found(parameter) for place in found]
        yield from {holder[key]: None for holder, key in places if not has_memory_of(holder[key], parameter)}


def attributes_with(parameter: Tensor, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the attributes of a parameter with other tensors, in copies of the objects and containers there.

    Args:
        parameter: the parameter
        change: maps tensors
    """
    attributes = dict(vars(parameter))
    copies: dict[int, Any] = {}
    for name, found in _found(parameter):
        for holder, key in [*_places(attributes, name, copies, copies=True)] if found else ():
            holder[key] = change(holder[key])
    return attributes


def has_memory_of(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor among the attributes of a parameter has the very memory of that parameter."""
    if not tensor.layout is parameter.layout is torch.strided or tensor.dtype is not parameter.dtype:
        return False
    ours, theirs = [(one.shape, one.stride(), one.data_ptr()) for one in (tensor, parameter)]
    return ours == theirs


def _found(parameter: Tensor) -> Iterator[tuple[str, list[tuple[Any, Any]]]]:
    """Yield the name of each attribute that is a part of a parameter, and where tensors are in it."""
    attributes = vars(parameter)
    # The attributes of a tensor that wraps others are its values.
    for name in [] if is_wrapper(parameter) else [*attributes]:
        found = [*_places(attributes, name, {id(attributes): attributes})]
        if not any([isinstance(holder[key], (nn.Parameter, nn.Module)) for holder, key in found]):
            yield name, found


class _Attributes:
    """The attributes of an object, as items."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)


class _Items:
    """The items of a tuple, which is replaced where it is held."""

    def __init__(self, holder: Any, key: Any) -> None:
        self._holder, self._key = holder, key

    def __getitem__(self, k: int) -> Any:
        return self._holder[self._key][k]

    def __setitem__(self, k: int, value: Any) -> None:
        items = self._holder[self._key]
        self._holder[self._key] = (*items[:k], value, *items[k + 1 :])


def _places(holder: Any, key: Any, known: dict[int, Any], *, copies: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yield where tensors and modules are, in or below an item: what holds them, and by which key.

    Args:
        holder: what holds the item
        key: the item's name, index or key there
        known: by the id of an object or container that was visited: what stands for it
        copies: whether copies of objects and containers shall be held in their places
    """
    value: Any = holder[key]
    kind: Any = type(value)
    if isinstance(value, (Tensor, nn.Module)):
        yield holder, key
    elif id(value) in known:
        if copies:
            holder[key] = known[id(value)]
    else:
        inside: tuple[Any, Any] = (), ()
        if kind is not tuple and (isinstance(value, (list, dict)) or is_plain_object(value)):
            original, value = value, copy.copy(value) if copies else value
            known[id(original)] = value
            if copies:
                holder[key] = value
        if kind is tuple:
            inside = _Items(holder, key), range(len(value))
        elif isinstance(value, list):
            inside = value, range(len(value))
        elif isinstance(value, dict):
            inside = value, [*value]
        elif is_plain_object(value):
            inside = _Attributes(value), _names_of(value)
        for k in inside[1]:
            yield from _places(inside[0], k, known, copies=copies)


def _names_of(value: Any) -> list[str]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for known in slots for name in ((known,) if isinstance(known, str) else known)]
    return [*getattr(value, "__dict__", {}), *[name for name in names if hasattr(value, name)]]
