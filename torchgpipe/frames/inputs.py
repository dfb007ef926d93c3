"""Splitting the arguments of a model into those of micro-batches.

Which arguments are split along dimension 0 is decided once, from the sample, by name: a table that is no part of the
batch may happen to have as many rows as the batch.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.frames.values import each, is_cache, mapped

__all__ = ["Arguments", "Splitter", "arguments_of", "chunk_sizes", "rebuilt", "resized"]


class Arguments(NamedTuple):
    """The arguments of a call of the model: with a mini-batch, a micro-batch, or the sample."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of(sample: Any) -> Arguments:
    """Return a sample, which is a tuple, a dict, or a pair of both, as arguments.

    Raises:
        TypeError: the sample is something else.
    """
    if isinstance(sample, Mapping):
        return Arguments((), dict(sample))
    if isinstance(sample, Tensor):
        return Arguments((sample,), {})
    if isinstance(sample, tuple):
        if len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
            return Arguments(*sample)
        return Arguments(sample, {})
    raise TypeError(
        "sample must be the arguments of one micro-batch: a tuple of positional ones, a dict of keyword ones, or "
        f"(tuple, dict), but got {type(sample).__name__}"
    )


class Splitter:
    """Splits arguments by name.

    Args:
        forward: the model's forward, whose parameters have names
        sample: the arguments of one micro-batch
        no_chunk: the names of arguments that are passed whole

    Attributes:
        rows: the number of rows of the sample; 0 if it has nothing to split

    Raises:
        ValueError: ``no_chunk`` names no argument of the sample.
    """

    def __init__(self, forward: Callable[..., Any], sample: Arguments, no_chunk: Collection[str]) -> None:
        self._names = _positional(forward)
        named = dict(self._named(sample))
        unknown = [name for name in no_chunk if name not in named and name not in self._names]
        if unknown:
            raise ValueError(f"no_chunk names {unknown}, but the arguments of the sample are {[*named]}")
        self._whole = {*no_chunk}
        self.rows = _rows(value for name, value in named.items() if name not in self._whole)
        #: For each path in the sample, whether it is split.
        self._split = {
            path: _is_split(value, self.rows)
            for name, argument in named.items()
            if name not in self._whole
            for path, value in _parts(argument, name)
        }

    def names(self, arguments: Arguments) -> dict[str, Any]:
        """Return arguments by their names."""
        return dict(self._named(arguments))

    def rows_of(self, arguments: Arguments) -> int:
        """Return the number of rows of a mini-batch; 0 if there is nothing to split."""
        parts = [
            (path, value)
            for name, argument in self._named(arguments)
            if name not in self._whole
            for path, value in _parts(argument, name)
        ]
        known = [_length(value) for path, value in parts if self._split.get(path)]
        if known:
            return max(known)
        return _rows(argument for name, argument in self._named(arguments) if name not in self._whole)

    def split(self, arguments: Arguments, sizes: list[int]) -> list[Arguments]:
        """Return the arguments of each micro-batch.

        Args:
            arguments: those of a mini-batch
            sizes: the number of rows of each micro-batch

        Raises:
            ValueError: an argument that is split does not have the rows of the others.
        """
        rows = sum(sizes)
        faults: list[str] = []
        parts = {
            name: [value] * len(sizes) if name in self._whole else self._divided(value, name, rows, sizes, faults)
            for name, value in self._named(arguments)
        }
        if faults:
            raise ValueError(
                f"the batch has {rows} rows in dimension 0, but {', '.join(faults)}; name in no_chunk what every "
                "micro-batch gets whole"
            )
        names = list(parts)
        count = len(arguments.args)
        return [
            Arguments(
                tuple([parts[name][i] for name in names[:count]]),
                {name: parts[name][i] for name in names[count:]},
            )
            for i in range(len(sizes))
        ]

    def resized(self, sample: Arguments, rows: int) -> Arguments:
        """Return the sample with so many rows; what is passed whole stays as it is."""
        named = self._named(sample)
        values = [value if name in self._whole else resized(value, self.rows, rows) for name, value in named]
        count = len(sample.args)
        return Arguments(tuple(values[:count]), dict(zip(sample.kwargs, values[count:])))

    def _named(self, arguments: Arguments) -> Iterator[tuple[str, Any]]:
        for k, value in enumerate(arguments.args):
            yield self._names[k] if k < len(self._names) else f"argument {k}", value
        yield from arguments.kwargs.items()

    def _divided(self, value: Any, path: str, rows: int, sizes: list[int], faults: list[str]) -> list[Any]:
        """Return what each micro-batch gets of a value; ``faults`` takes what has another number of rows."""
        if isinstance(value, Tensor) or _is_list_of_rows(value, rows):
            length = _length(value)
            wanted = self._split.get(path, length == rows)
            if not wanted or (length <= 1 and rows != 1):  # A single row is broadcast.
                return [value] * len(sizes)
            if length != rows:
                faults.append(f"'{path}' has {length}")
                return [value] * len(sizes)
            if isinstance(value, Tensor):
                rows_of_each = torch.split(value, sizes)
                # Each with a version of its own: a model may change its input in place, and so no other micro-batch's.
                return [part if part.requires_grad else part.data for part in rows_of_each]
            ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
            return [value[end - size : end] for end, size in zip(ends, sizes)]
        if is_cache(value):
            return [_cache_rows(value, rows, sizes, i) for i in range(len(sizes))]
        if isinstance(value, (tuple, list)):
            items = [self._divided(item, f"{path}[{k}]", rows, sizes, faults) for k, item in enumerate(value)]
            return [rebuilt(value, [parts[i] for parts in items]) for i in range(len(sizes))]
        if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
            pairs = {key: self._divided(item, f"{path}.{key}", rows, sizes, faults) for key, item in value.items()}
            copies: list[Any] = [copy.copy(value) for _ in sizes]
            for i, one in enumerate(copies):
                for key, parts in pairs.items():
                    one[key] = parts[i]
            return copies
        return [value] * len(sizes)


def _positional(forward: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _rows(values: Iterator[Any]) -> int:
    """Return the most common size in dimension 0; the first of them, if several are. A list counts as its items."""
    sizes: Counter[int] = Counter()
    for value in values:
        if type(value) is list:
            sizes[len(value)] += 1
        else:
            sizes.update([len(tensor) for _, tensor in each(value) if tensor.dim()])
    return sizes.most_common(1)[0][0] if sizes else 0


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and lists in an argument with their paths."""
    yield from each(value, path)
    if type(value) is list:
        yield path, value


def _length(value: Any) -> int:
    return (len(value) if value.dim() else 0) if isinstance(value, Tensor) else len(value)


def _is_split(value: Any, rows: int) -> bool:
    return _is_list_of_rows(value, rows) if type(value) is list else _length(value) == rows > 0


def _is_list_of_rows(value: Any, rows: int) -> bool:
    """Return whether a list has an element for each row, such as the targets of a detection model."""
    return type(value) is list and len(value) == rows


def rebuilt(value: Any, items: list[Any]) -> Any:
    """Return a tuple or list of the class of ``value`` with other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _cache_rows(value: Any, rows: int, sizes: list[int], i: int) -> Any:
    """Return the rows of micro-batch ``i`` of a cache, whose tensors are among its attributes."""

    def part(tensor: Tensor) -> Tensor:
        return torch.split(tensor, sizes)[i] if tensor.dim() and len(tensor) == rows > 0 else tensor

    return mapped(value, part, caches=True)


def resized(value: Any, before: int, rows: int) -> Any:
    """Return a value of ``before`` rows with ``rows`` of them: rows are left out, or repeated."""
    index = torch.arange(rows) % before

    def chosen(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != before:
            return tensor
        # Detached, or a backward would add gradients to what the caller's sample was made of.
        return tensor.detach()[index.to(tensor.device)].requires_grad_(tensor.requires_grad)

    if _is_list_of_rows(value, before):
        return [value[k % before] for k in range(rows)]
    return mapped(value, chosen, caches=True)


def chunk_sizes(rows: int, chunks: int) -> list[int]:
    """Return the sizes of the parts into which `torch.chunk` splits so many rows."""
    return [len(part) for part in torch.empty(rows, device="meta").chunk(chunks)]
