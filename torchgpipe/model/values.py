"""Walking through the values that a model passes around: containers with tensors somewhere in them.

This file knows the containers of any model: tuples, named tuples, lists, dicts and other mappings, dataclasses, and,
where they are asked for, caches of earlier tokens and plain objects. Everything else is passed as
it is. `container` opens any of them; `mapped` has the first ones written out, because it runs for every call of a
module of the spine, and for every operation between two of them: a general library takes five times as long.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = [
    "Container",
    "Exchanged",
    "container",
    "copied",
    "copy_without_graph",
    "dotted",
    "each",
    "is_cache",
    "is_plain_object",
    "mapped",
    "put_in_place",
    "refill",
    "spread",
    "walk",
]

_PLAIN = (int, float, str, bool, type(None))


class Container(NamedTuple):
    """A value that holds other values.

    Attributes:
        kind: what two containers of the same structure have in common: the class, or the name of a class that is made
            anew in each forward, as of named tuples
        names: the path of each item within the container, such as ``'[0]'`` or ``'logits'``
        items: the items
        rebuilt: returns a container like this one with other items
    """

    kind: Any
    names: list[str]
    items: list[Any]
    rebuilt: Callable[[Sequence[Any]], Any]


def container(value: Any, *, caches: bool = False, objects: bool = False) -> Container | None:
    """Open a container; return None for any other value.

    Args:
        value: a value
        caches: whether to open caches, too, which are copied when they are rebuilt
        objects: whether to open plain objects, too, which are copied when they are rebuilt
    """
    kind: Any = type(value)
    if isinstance(value, (Tensor, *_PLAIN)) or (not (caches or objects) and _is_opaque(kind)):
        return None
    if isinstance(value, (tuple, list)):
        if isinstance(value, PackedSequence):  # A recurrent layer reads its batch sizes on the host, where they stay.
            names = ["data", "sorted_indices", "unsorted_indices"]
            items = [getattr(value, name) for name in names]
            return Container(kind, names, items, lambda new: kind(new[0], value.batch_sizes, *new[1:]))
        if hasattr(value, "_fields") and isinstance(value, tuple):
            return Container((kind.__name__, value._fields), list(value._fields), list(value), lambda new: kind(*new))
        items = list(value)
        return Container(kind, [f"[{k}]" for k in range(len(items))], items, lambda new: kind(new))
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        keys = list(value)
        return Container(
            kind, [str(key) for key in keys], [value[key] for key in keys], lambda new: _set(value, keys, new)
        )
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
    elif (caches and is_cache(value)) or (objects and hasattr(value, "__dict__") and is_plain_object(value)):
        names = list(vars(value))
    else:
        return None
    return Container(kind, names, [getattr(value, name) for name in names], lambda new: _assigned(value, names, new))


@cache
def _is_opaque(kind: Any) -> bool:
    """Return whether an object of a class is no container, but for caches and plain objects; that takes long to see."""
    return not (issubclass(kind, (tuple, list, Mapping)) or is_dataclass(kind))


def _set(value: Any, keys: Sequence[Any], items: Sequence[Any]) -> Any:
    changed: Any = {} if type(value) is dict else copy.copy(value)
    for key, item in zip(keys, items, strict=True):
        changed[key] = item
    return changed


def _assigned(value: Any, names: Sequence[str], items: Sequence[Any]) -> Any:
    changed = copy.copy(value)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(changed, name, item)
    return changed


def mapped(value: Any, change: Callable[[Tensor], Any], *, caches: bool = False, objects: bool = False) -> Any:
    """Return ``value`` with every tensor replaced by ``change(tensor)``; what has no changed tensor is the same object.

    Args:
        value: a value
        change: maps tensors
        caches: whether to look into caches as well, which are then copied
        objects: whether to look into plain objects as well, which are then copied
    """
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        items = [mapped(item, change, caches=caches, objects=objects) for item in value]
        return value if all([a is b for a, b in zip(items, value)]) else kind(items)
    if kind is dict:
        pairs = {key: mapped(item, change, caches=caches, objects=objects) for key, item in value.items()}
        return value if all([pairs[key] is value[key] for key in value]) else pairs
    if not (caches or objects) and _is_opaque(kind):  # type: ignore[arg-type]  # A cache of 32 layers is passed to each of 32 modules.
        return value
    opened = container(value, caches=caches, objects=objects)
    if opened is None:
        return value
    objects = objects and isinstance(value, (tuple, list, Mapping))  # Objects may refer to each other in a circle.
    items = [mapped(item, change, caches=caches, objects=objects) for item in opened.items]
    return value if all([a is b for a, b in zip(items, opened.items)]) else opened.rebuilt(items)


class Exchanged:
    """The arguments of a call with other tensors, where the call may change the containers that it gets.

    A container in which a tensor is another one is a copy, and what the call adds to a copy, as to a list of states,
    would be lost.

    Args:
        args: arguments
        kwargs: arguments with names
        change: maps tensors
        caches: whether to look into caches that are arguments; if not, the call gets them as they are

    Attributes:
        args: the arguments with ``change(tensor)`` in the place of every tensor
        kwargs: the same of those with names
    """

    def __init__(self, args: Any, kwargs: Any, change: Callable[[Tensor], Any], *, caches: bool = True) -> None:
        def exchanged(value: Any) -> Any:
            return value if not caches and is_cache(value) else mapped(value, change, objects=True)

        self.args, self.kwargs = tuple(map(exchanged, args)), {key: exchanged(value) for key, value in kwargs.items()}
        self._copies = [*_copies(args, self.args), *_copies(tuple(kwargs.values()), tuple(self.kwargs.values()))]

    def hand_over(self) -> None:
        """Do to the containers of the given arguments what was done to their copies."""
        for copied in self._copies:
            copied.hand_over()


class _Copy(NamedTuple):
    """A list, a mapping or an object, and its copy with other items.

    Attributes:
        original: the container
        copy: its copy
        given: what the copy held when it was made, by index, key or name
        originals: id(item of the copy) -> item of the original
    """

    original: Any
    copy: Any
    given: dict[Any, Any]
    originals: dict[int, Any]

    def hand_over(self) -> None:
        """Do to the original what was done to the copy."""
        now = _entries(self.copy)
        if len(now) == len(self.given) and all([now[key] is self.given.get(key, self) for key in now]):
            return
        if isinstance(self.original, list):
            self.original[:] = [self.originals.get(id(item), item) for item in self.copy]
            return
        is_mapping = isinstance(self.original, Mapping)
        remove: Any = type(self.original).__delitem__ if is_mapping else object.__delattr__
        put: Any = type(self.original).__setitem__ if is_mapping else object.__setattr__
        for key in self.given.keys() - now.keys():
            remove(self.original, key)
        for key, item in now.items():
            if item is not self.given.get(key, self):
                put(self.original, key, self.originals.get(id(item), item))


def _entries(value: Any) -> dict[Any, Any]:
    """Return the items of a container by index, key or name."""
    if isinstance(value, Mapping):
        return {key: value[key] for key in value}
    opened = container(value, objects=True)
    assert opened is not None
    return dict(enumerate(opened.items)) if isinstance(value, list) else dict(zip(opened.names, opened.items))


def _copies(value: Any, exchanged: Any) -> Iterator[_Copy]:
    """Yield the containers in a value that `mapped` has copied and that can change, each with its copy."""
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, tuple):
        pairs = zip(value, exchanged)
    else:
        before, after = _entries(value), _entries(exchanged)
        yield _Copy(value, exchanged, after, {id(after[key]): before[key] for key in after})
        pairs = [(before[key], after[key]) for key in after]
    for a, b in pairs:
        if a is not b and not isinstance(a, Tensor):
            yield from _copies(a, b)


def refill(value: Any, told: Any) -> None:
    """Let the lists, mappings and objects in ``value`` hold what those in ``told`` do, but for caches."""
    if isinstance(value, tuple):
        for item, other in zip(value, told, strict=True):
            refill(item, other)
    elif not is_cache(value) and not isinstance(value, Tensor) and container(value, objects=True) is not None:
        given, kept = _entries(value), dict[int, Any]()
        for key, other in _entries(told).items():
            item = given.get(key)
            if item is None or isinstance(other, (Tensor, *_PLAIN, tuple)):
                continue
            if type(item) is type(other):
                refill(item, other)
            elif container(other, objects=True) is not None:
                continue
            kept[id(other)] = item
        _Copy(value, told, given, kept).hand_over()


def put_in_place(value: Any, new: Mapping[int, Tensor]) -> None:
    """Put tensors in the place of others that lists, mappings and objects in ``value`` hold, by the ids of those."""
    refill(value, mapped(value, lambda tensor: new.get(id(tensor), tensor), objects=True))


def copied(value: Any, *, objects: bool = True) -> Any:
    """Return ``value`` with copies of all containers in it, and the same tensors.

    Args:
        value: a value
        objects: whether to copy plain objects, too
    """
    opened = container(value, caches=True, objects=objects)
    if opened is None:
        return value
    objects = objects and isinstance(value, (tuple, list, Mapping))  # Objects may refer to each other in a circle.
    return opened.rebuilt([copied(item, objects=objects) for item in opened.items])


def walk(value: Any, path: str = "", *, objects: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield a value and everything in its containers, with their paths; that of the value itself is ``path``.

    Args:
        value: a value
        path: its path
        objects: whether to look into plain objects of the user's classes, too
    """
    yield path, value
    opened = container(value, objects=objects)
    if opened is not None:
        objects = objects and isinstance(value, (tuple, list, Mapping))  # Objects may refer to each other in a circle.
        for name, item in zip(opened.names, opened.items):
            yield from walk(item, dotted(path, name), objects=objects)


def each(value: Any, *, objects: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in ``value`` with its path, such as ``'hidden_states[0]'``; 'value' for the value itself."""
    for where, item in walk(value, objects=objects):
        if isinstance(item, Tensor):
            yield where or "value", item


def spread(value: Any, divide: Callable[[Any, str], list[Any] | None], count: int, path: str = "") -> list[Any]:
    """Return ``count`` values like ``value``, such as the parts of a mini-batch.

    Args:
        value: a value
        divide: maps what is in the value, and its path, to the ``count`` things in its place; None to look into it
        count: how many
        path: the path of the value
    """
    parts = divide(value, path)
    if parts is not None:
        return parts
    opened = container(value, caches=True)
    if opened is None:
        return [value] * count
    items = [spread(item, divide, count, dotted(path, name)) for name, item in zip(opened.names, opened.items)]
    return [opened.rebuilt([parts[k] for parts in items]) for k in range(count)]


def is_cache(value: Any) -> bool:
    """Return whether ``value`` is an object that keeps tensors of earlier tokens, or a layer of such an object."""
    kind: Any = type(value)
    return _is_kind_of_cache(kind) and hasattr(value, "__dict__")


@cache
def _is_kind_of_cache(kind: Any) -> bool:
    if issubclass(kind, (type, Tensor, Mapping, nn.Module)):
        return False
    return any(["Cache" in base.__name__ for base in kind.__mro__])


def is_plain_object(value: Any) -> bool:
    """Return whether an object is a mere holder of attributes, so that a copy does the same.

    Of torch's own objects, only those that hold tensors are, such as a BlockMask: no streams, no groups of processes.
    """
    kind: Any = type(value)
    return _is_plain(kind) and (
        kind.__module__.partition(".")[0] != "torch"
        or any([isinstance(item, Tensor) for item in getattr(value, "__dict__", {}).values()])
    )


@cache
def _is_plain(kind: Any) -> bool:
    others = (type, nn.Module, torch.Generator, types.FunctionType, types.MethodType, types.ModuleType, BaseException)
    return not issubclass(kind, others) and kind.__module__ not in ("builtins", "_thread")


def copy_without_graph(tensor: Tensor) -> Tensor:
    """Return a copy without a graph: the model may change the tensor later."""
    return tensor.detach().clone()


def dotted(path: str, name: str) -> str:
    """Return the path of what is at ``name`` within what is at ``path``: of a value, or of a module; '' is the top."""
    return f"{path}{name}" if name.startswith("[") or not path else f"{path}.{name}"
