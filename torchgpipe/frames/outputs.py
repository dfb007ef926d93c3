"""Joining the outputs of micro-batches into one output of the same structure.

What has the rows of the batch is concatenated. Numbers, such as a loss, are added up or averaged. What has nothing to
do with the batch is that of the first micro-batch. How an output depends on the rows is seen from two runs of the
sample, the second with a row less; if it couples the rows with each other, there is no way to join it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from torchgpipe.frames.values import dotted, each, is_cache

__all__ = ["JoinScalar", "Kinds", "join", "kinds_of", "own_loss", "verify_known"]

#: For each output, the dimension of the rows; None if it has nothing to do with them, 'coupled' if it couples them.
Kinds: TypeAlias = dict[str, int | Literal["coupled"] | None]

#: Joins tensors without dimensions, such as losses, given the path of the output.
JoinScalar: TypeAlias = Callable[[str, Sequence[Tensor]], Tensor]


def own_loss(output: Any) -> Any:
    """Return the ``loss`` of a model's output; None if the output has none."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def kinds_of(output: Any, rows: int, other: Any, other_rows: int) -> Kinds:
    """Return how outputs depend on the rows.

    Args:
        output: the output for ``rows`` rows
        rows: a number of rows
        other: the output for ``other_rows`` rows
        other_rows: another number of rows
    """
    tensors, lengths = dict(each(other)), dict(_lengths(other, ""))
    kinds: Kinds = {path: 0 for path, n in _lengths(output, "") if (n, lengths.get(path)) == (rows, other_rows)}
    for path, tensor in each(output):
        there = tensors.get(path)
        if there is None or there.dim() != tensor.dim() or tensor.dim() == 0:
            continue
        varying = [d for d in range(tensor.dim()) if tensor.shape[d] != there.shape[d]]
        if not varying:
            kinds[path] = None
        elif len(varying) == 1 and tensor.shape[varying[0]] * other_rows == there.shape[varying[0]] * rows:
            kinds[path] = varying[0]
        else:
            kinds[path] = "coupled"
    return kinds


def _lengths(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield the lengths of lists and tuples, with their paths."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lengths(item, dotted(path, str(key)))
    elif type(value) in (list, tuple):
        yield path, len(value)
        for k, item in enumerate(value):
            yield from _lengths(item, f"{path}[{k}]")


def verify_known(output: Any, path: str = "") -> None:
    """Check that tensors with a graph are only where `join` finds them.

    Raises:
        TypeError: an object of an unknown class has a tensor that requires grad.
    """
    if output is None or isinstance(output, (Tensor, str, int, float)) or is_cache(output):
        return
    if isinstance(output, Mapping):
        for key, item in output.items():
            verify_known(item, dotted(path, str(key)))
    elif isinstance(output, (tuple, list)):
        for k, item in enumerate(output):
            verify_known(item, f"{path}[{k}]")
    elif is_dataclass(output):
        for field in fields(output):
            verify_known(getattr(output, field.name, None), dotted(path, field.name))
    else:
        inside = [name for name, value in getattr(output, "__dict__", {}).items() if isinstance(value, Tensor)]
        if any([vars(output)[name].requires_grad for name in inside]):
            raise TypeError(
                f"the output '{path or 'value'}' is {type(output).__name__}, whose tensors {inside} would get no "
                "gradient; return the tensors in a dict, a tuple or a dataclass, or use model.step with a loss_fn"
            )


def join(outputs: Sequence[Any], sizes: Sequence[int], kinds: Kinds, scalar: JoinScalar) -> Any:
    """Return the output of a mini-batch.

    Args:
        outputs: the output of each micro-batch
        sizes: the rows of each micro-batch
        kinds: how outputs depend on the rows; what is missing is decided by its sizes
        scalar: joins tensors without dimensions

    Raises:
        ValueError: an output couples the rows, or differs in structure between micro-batches.
        TypeError: an output is an object that cannot be joined.
    """
    return outputs[0] if len(outputs) == 1 else _Join(sizes, kinds, scalar).join(list(outputs), "")


class _Join:
    def __init__(self, sizes: Sequence[int], kinds: Kinds, scalar: JoinScalar) -> None:
        self._sizes, self._kinds, self._scalar = sizes, kinds, scalar
        #: A tensor that occurs twice in the output is joined once.
        self._done: dict[tuple[int, ...], Tensor] = {}

    def join(self, values: list[Any], path: str) -> Any:
        first = values[0]
        if any([type(value) is not type(first) for value in values]):
            raise _differs(path, [type(value).__name__ for value in values])
        if isinstance(first, Tensor):
            key = tuple(map(id, values))
            if key not in self._done:
                self._done[key] = self._tensor(values, path or "value")
            return self._done[key]
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            return type(first)(
                *[self.join([getattr(value, name) for value in values], dotted(path, name)) for name in first._fields]
            )
        if type(first) in (list, tuple) and self._has_rows(values, path):
            return type(first)([item for value in values for item in value])
        if isinstance(first, (tuple, list)):
            if any([len(value) != len(first) for value in values]):
                raise _differs(path, [f"{len(value)} items" for value in values])
            items = [self.join([value[k] for value in values], f"{path}[{k}]") for k in range(len(first))]
            return type(first)(items)
        if isinstance(first, Mapping) and hasattr(first, "__setitem__"):
            if any([[*value] != [*first] for value in values]):
                raise _differs(path, [str([*value]) for value in values])
            joined: Any = copy.copy(first)
            for key in first:
                joined[key] = self.join([value[key] for value in values], dotted(path, str(key)))
            return joined
        if is_dataclass(first) and not isinstance(first, type):
            changed = copy.copy(first)
            for field in fields(first):
                if hasattr(first, field.name):
                    parts = [getattr(value, field.name) for value in values]
                    object.__setattr__(changed, field.name, self.join(parts, dotted(path, field.name)))
            return changed
        if is_cache(first):
            return _lazily_joined(values, self._sizes)
        if any([value is not first and value != first for value in values]):
            raise TypeError(
                f"the output '{path or 'value'}' is {type(first).__name__}, which differs between micro-batches and "
                "cannot be joined; use model.step, whose loss_fn gets the output of each micro-batch"
            )
        return first

    def _has_rows(self, values: list[Any], path: str) -> bool:
        """Return whether a list has an item for each row, such as the boxes of each image."""
        if path in self._kinds:
            return True
        items_are_rows = all([len(value) == size for value, size in zip(values, self._sizes)])
        tensors = [item for value in values for item in value if isinstance(item, Tensor)]
        return items_are_rows and not tensors

    def _tensor(self, values: list[Tensor], path: str) -> Tensor:
        first = values[0]
        if first.dim() == 0:
            return self._scalar(path, values)
        dim = self._kinds[path] if path in self._kinds else self._dimension(values, path)
        if dim is None:
            if all([one is first or torch.equal(one, first) for one in values]):
                return first
            raise ValueError(
                f"the output '{path}' of shape {tuple(first.shape)} has no dimension with the rows of the batch, and "
                "differs between micro-batches, so it cannot be joined; return a value for each row, or a number, or "
                "use model.step, whose loss_fn gets the output of each micro-batch"
            )
        if dim == "coupled" or any([_others(one, dim) != _others(first, dim) for one in values]):
            raise ValueError(
                f"the output '{path}' has shapes {[tuple(one.shape) for one in values]} in the micro-batches, and "
                "couples the rows of a batch, so it cannot be joined; use model.step with a loss_fn that takes the "
                "output of a micro-batch, or chunks=1"
            )
        return torch.cat(values, dim)

    def _dimension(self, values: list[Tensor], path: str) -> int | None:
        """Return the dimension of the rows of an output that the sample did not have."""
        if all([len(one) % size == 0 and len(one) >= size for one, size in zip(values, self._sizes)]):
            factors = {len(one) // size for one, size in zip(values, self._sizes)}
            if len(factors) == 1:
                return 0
        if all([one.shape == values[0].shape and torch.equal(one, values[0]) for one in values]):
            return None
        raise _differs(path, [str(tuple(one.shape)) for one in values])


def _others(tensor: Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _differs(path: str, what: list[str]) -> ValueError:
    return ValueError(
        f"the output '{path or 'value'}' differs between micro-batches ({', '.join(what)}), so it cannot be joined; "
        "pad the batch so that all micro-batches are alike, or use model.step, whose loss_fn gets each of them"
    )


def _lazily_joined(caches: list[Any], sizes: Sequence[int]) -> Any:
    """Return a cache of the same class, whose tensors are concatenated when it is first used.

    Decoders return a cache in training by default, and hardly anybody looks at it.
    """
    kind: Any = type(caches[0])
    pending = list(caches)

    def fill(self: Any, name: str) -> Any:
        if not pending:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        state = _joined_state([vars(cache) for cache in pending], sizes)
        pending.clear()
        object.__setattr__(self, "__class__", kind)
        vars(self).update(state)
        return getattr(self, name)

    lazy: Any = type(kind.__name__, (kind,), {"__getattr__": fill, "__module__": kind.__module__})
    return lazy.__new__(lazy)


def _joined_state(values: list[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        has_rows = first.dim() > 0 and all([len(one) == size for one, size in zip(values, sizes)])
        return torch.cat([one.detach() for one in values]) if has_rows else first
    if type(first) in (list, tuple):
        return type(first)([_joined_state(list(items), sizes) for items in zip(*values)])
    if type(first) is dict:
        return {key: _joined_state([value[key] for value in values], sizes) for key in first}
    if is_cache(first):
        joined = copy.copy(first)
        vars(joined).update(_joined_state([vars(value) for value in values], sizes))
        return joined
    return first
