"""Walking through the values that a model passes around: containers with tensors somewhere in them.

Models pass tensors, tuples, lists, dicts, dataclasses, and dicts that are dataclasses (as the outputs of transformers
are). Everything else is passed as it is. Hand-written, because it runs for every call of a module of the spine, and for
every operation between two of them: a general library takes five times as long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

__all__ = ["dotted", "each", "is_cache", "mapped"]

_PLAIN = (int, float, str, bool, type(None))


def mapped(value: Any, change: Callable[[Tensor], Any], *, caches: bool = False) -> Any:
    """Return ``value`` with every tensor replaced by ``change(tensor)``; what has no changed tensor is the same object.

    Args:
        value: a value
        change: maps tensors
        caches: whether to look into caches as well, which are then copied
    """
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        items = [mapped(item, change, caches=caches) for item in value]
        return value if all([a is b for a, b in zip(items, value)]) else kind(items)
    if kind is dict:
        pairs = {key: mapped(item, change, caches=caches) for key, item in value.items()}
        return value if all([pairs[key] is value[key] for key in value]) else pairs
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [mapped(item, change, caches=caches) for item in value]
        return value if all([a is b for a, b in zip(items, value)]) else kind(*items)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change, caches=caches) for item in value]
        return value if all([a is b for a, b in zip(items, value)]) else kind(items)
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        pairs = {key: mapped(item, change, caches=caches) for key, item in value.items()}
        return value if all([pairs[key] is value[key] for key in value]) else _updated(value, pairs)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        pairs = {name: mapped(getattr(value, name), change, caches=caches) for name in names}
        if all([pairs[name] is getattr(value, name) for name in names]):
            return value
        changed = copy.copy(value)
        for name, item in pairs.items():
            object.__setattr__(changed, name, item)
        return changed
    if caches and is_cache(value):
        changed = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(changed, name, mapped(item, change, caches=True))
        return changed
    return value


def is_cache(value: Any) -> bool:
    """Return whether ``value`` is an object that keeps tensors of earlier tokens, or a layer of such an object."""
    kind: Any = type(value)
    return _is_kind_of_cache(kind) and hasattr(value, "__dict__")


@cache
def _is_kind_of_cache(kind: Any) -> bool:
    if issubclass(kind, (type, Tensor, Mapping, nn.Module)):
        return False
    return any(["Cache" in base.__name__ or base.__name__.endswith("LayerMixin") for base in kind.__mro__])


def _updated(value: Any, pairs: dict[Any, Any]) -> Any:
    changed = copy.copy(value)
    for key, item in pairs.items():
        changed[key] = item
    return changed


def each(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in ``value`` with its path, such as ``'hidden_states[0]'``."""
    if isinstance(value, Tensor):
        yield path or "value", value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield from each(getattr(value, name), dotted(path, name))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from each(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from each(item, dotted(path, str(key)))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from each(getattr(value, field.name, None), dotted(path, field.name))


def dotted(path: str, name: str) -> str:
    """Return the path of what is at ``name`` within what is at ``path``: of a value, or of a module; '' is the top."""
    return f"{path}.{name}" if path else name
