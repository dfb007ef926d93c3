"""The tensors among the attributes of a parameter, such as the scales of a quantised weight, which follow it.

The object that holds them may be known to the parameter's module as well. So it stays the same object, and gets the
tensors on the other device. An attribute that leads to a module or to another parameter, such as an optimizer, is no
part of this parameter, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices import links
from torchgpipe.devices.device import same_memory
from torchgpipe.model.values import is_plain_object

__all__ = ["move_attached"]


def move_attached(parameter: nn.Parameter, device: torch.device) -> None:
    """Move the tensors among the attributes of a parameter, and in the objects and containers there, to ``device``."""
    attributes = vars(parameter)
    for name in [*attributes]:
        found = [*_places(attributes, name, {id(attributes)})]
        if any([isinstance(holder[key], (nn.Parameter, nn.Module)) for holder, key in found]):
            continue
        for holder, key in found:
            if not same_memory(holder[key].device, device):
                holder[key] = links.to(holder[key], device)


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


def _places(holder: Any, key: Any, known: set[int]) -> Iterator[tuple[Any, Any]]:
    """Yield where tensors and modules are, in or below an item: what holds them, and by which key."""
    value: Any = holder[key]
    kind: Any = type(value)
    if isinstance(value, (Tensor, nn.Module)):
        yield holder, key
    elif id(value) not in known:
        known.add(id(value))
        inside: tuple[Any, Any] = (), ()
        if kind is tuple:
            inside = _Items(holder, key), range(len(value))
        elif isinstance(value, list):
            inside = value, range(len(value))
        elif isinstance(value, dict):
            inside = value, [*value]
        elif is_plain_object(value):
            inside = _Attributes(value), _names_of(value)
        for k in inside[1]:
            yield from _places(inside[0], k, known)


def _names_of(value: Any) -> list[str]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for known in slots for name in ((known,) if isinstance(known, str) else known)]
    return [*getattr(value, "__dict__", {}), *[name for name in names if hasattr(value, name)]]
