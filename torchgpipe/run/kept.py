"""What modules keep as attributes in their forward, where the model may read it: an auxiliary loss, a length.

Another process does not run the module, so there the attributes must come to stand for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.model.values import copied, walk

__all__ = ["Attribute", "KeptAttributes", "put_values", "values_of"]

#: An attribute: the number of the module, of those inside of one, and the name.
Attribute: TypeAlias = tuple[int, str]

#: What every module has is not for the model to read.
_OF_EVERY_MODULE = {*vars(nn.Module())}

_nothing: Any = object()


class KeptAttributes:
    """The tensors, numbers, words, lists and dicts that a module and those inside have as attributes.

    Args:
        module: the module
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [vars(child) for child in module.modules()]
        #: What is there now, with copies of lists and dicts, to which a module may add.
        self._before = [
            {name: copied(value, objects=False) for name, value in _values(place)} for place in self._places
        ]

    def set_since(self) -> list[Attribute]:
        """Return which attributes were set or changed since."""
        return [
            (k, name)
            for k, (place, before) in enumerate(zip(self._places, self._before))
            for name in sorted({*before, *dict(_values(place))})
            if not _is_same(before.get(name, _nothing), place.get(name, _nothing))
        ]

    def disturb(self) -> Callable[[], None]:
        """Change the numbers in what was set since, as another micro-batch might; return what makes that undone."""
        since = [(self._places[k], name) for k, name in self.set_since() if name in self._places[k]]
        true = [place[name] for place, name in since]
        for place, name in since:
            place[name] = _disturbed(place[name])

        def undo() -> None:
            for (place, name), value in zip(since, true):
                place[name] = value

        return undo


def values_of(module: nn.Module, attributes: Sequence[Attribute]) -> list[Any]:
    """Return the values of attributes; None of those that there are not."""
    modules = [*module.modules()] if attributes else []
    return [vars(modules[k]).get(name) for k, name in attributes]


def put_values(module: nn.Module, attributes: Sequence[Attribute], values: Sequence[Any]) -> None:
    """Give attributes the values that another process has told."""
    modules = [*module.modules()] if attributes else []
    for (k, name), value in zip(attributes, values, strict=True):
        vars(modules[k])[name] = value


def _values(place: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in place.items():
        if name not in _OF_EVERY_MODULE and _can_be_told(value):
            yield name, value


_PLAIN = (int, float, str, type(None), torch.Size)


def _can_be_told(value: Any) -> bool:
    """Return whether other processes can be told what a value is: objects of other classes, they have themselves."""
    return all([isinstance(item, (list, tuple, dict, Tensor, *_PLAIN)) for _, item in walk(value)])


def _disturbed(value: Any) -> Any:
    """Return a value with other numbers; tensors of two micro-batches differ anyway."""
    kind = type(value)
    if kind is bool:
        return not value
    if kind in (list, tuple, torch.Size):
        return kind([_disturbed(item) for item in value])
    if kind is dict:
        return {key: _disturbed(item) for key, item in value.items()}
    return value + 1 if kind in (int, float) else value


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all([_is_same(one, other) for one, other in zip(a, b)])
    if isinstance(a, dict):
        return a.keys() == b.keys() and all([_is_same(a[key], b[key]) for key in a])
    return isinstance(a, _PLAIN) and bool(a == b)
