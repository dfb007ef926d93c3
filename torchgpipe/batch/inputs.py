"""Splitting the arguments of a model into those of micro-batches.

What is split is decided once, from the sample, by name: a table that is no part of the batch may happen to have as many
rows as the batch. One rule:

1. Dimension 0 of the first tensor among the arguments is the batch, and its size the number of rows.
2. Every other tensor whose dimension 0 has that size in the sample is split, wherever it is: in a tuple, a named tuple,
   a dict or a dataclass, each item is an argument of its own. All other tensors are passed whole.
3. A list that has an item for each row, such as the images of a detection model, is split into shorter lists, unless
   its items are tensors that are split themselves, or None. If there are only lists, the items of the first are the
   rows; a tuple of tensors is split along their dimension 0.

Micro-batches that the caller gives, in `MicroBatches`, are taken as they are. If the sample was given so, every other
mini-batch is one micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.batch.given import GIVE_THEM, MicroBatches
from torchgpipe.batch.microbatch import chunk_sizes, has_an_item_for_each, rows_of, split_rows
from torchgpipe.batch.sequence import CarriedCache
from torchgpipe.model.values import each, is_cache, mapped, spread, walk

__all__ = ["Arguments", "SplitBatch", "Splitter", "arguments_of", "resized", "vary_row"]


class Arguments(NamedTuple):
    """The arguments of a call of the model: with a mini-batch, a micro-batch, or the sample."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def mapped(self, change: Callable[[Tensor], Tensor], *, caches: bool = True) -> Arguments:
        """Return the arguments with every tensor replaced by ``change(tensor)``; the same object if none is changed.

        Tensors in objects of the user's classes, such as batches of graphs, are replaced, too.

        Args:
            change: maps tensors
            caches: whether to look into caches as well
        """
        before = tuple(self)
        changed = mapped(before, change, caches=caches, objects=True)
        return self if changed is before else Arguments(*changed)

    @property
    def window(self) -> MicroBatches | None:
        """The micro-batches that the caller gives; None if there are none.

        Raises:
            TypeError: there are other arguments.
        """
        values = [*self.args, *self.kwargs.values()]
        windows = [value for value in values if isinstance(value, MicroBatches)]
        if windows and (len(values) > 1 or self.kwargs):
            raise TypeError(
                "MicroBatches must be the only argument, and each of them all arguments of a micro-batch: a tuple of "
                "positional ones, a dict of keyword ones, or (tuple, dict); give a step the targets of loss_fn by "
                "name, target=MicroBatches([...])"
            )
        return windows[0] if windows else None

    def with_values(self, values: Sequence[Any]) -> Arguments:
        """Return arguments of the same names with other values."""
        count = len(self.args)
        return Arguments(tuple(values[:count]), dict(zip(self.kwargs, values[count:], strict=True)))


def arguments_of(sample: Any) -> Arguments:
    """Return a sample, which is a tuple, a dict, or a pair of both, as arguments.

    Raises:
        TypeError: the sample is something else.
    """
    if isinstance(sample, Mapping):
        return Arguments((), dict(sample))
    if isinstance(sample, Tensor):
        return Arguments((sample,), {})
    if _is_plain_tuple(sample):
        if len(sample) == 2 and _is_plain_tuple(sample[0]) and isinstance(sample[1], dict):
            return Arguments(*sample)
        return Arguments(sample, {})
    raise TypeError(
        "sample must be the arguments of one micro-batch: a tuple of positional ones, a dict of keyword ones, or "
        f"(tuple, dict), but got {type(sample).__name__}; for a model that takes one such argument, give (sample,)"
        "; in MicroBatches, [(batch_1,), (batch_2,), ...]"
    )


class Splitter:
    """Splits arguments by name.

    Args:
        forward: the model's forward, whose parameters have names
        sample: the arguments of one micro-batch
        no_chunk: the names of arguments that are passed whole
        splits: whether mini-batches are split; if not, they are micro-batches

    Attributes:
        splits: see above
        on_meta: whether the sample had no values, so that arguments had to be left out whose values the model looks at
        given: the names of the arguments that the sample gives
        rows: the number of rows of the sample; 0 if there is nothing to split
        batch: the name of the argument whose dimension 0 is the batch; '' if there is none

    Raises:
        ValueError: ``no_chunk`` names no argument of the sample, a tensor is nested, or there are no rows.
    """

    def __init__(
        self, forward: Callable[..., Any], sample: Arguments, no_chunk: Collection[str], *, splits: bool = True
    ) -> None:
        self.splits, self.on_meta = splits, False
        self._names = _positional(forward)
        named = dict(self._named(sample))
        unknown = [name for name in no_chunk if name not in named and name not in _parameters(forward)]
        if unknown:
            raise ValueError(f"no_chunk names {unknown}, but the arguments of the sample are {[*named]}")
        self._whole = {*no_chunk}
        to_split = [name for name in named if splits and name not in self._whole]
        parts = [part for name in to_split for part in _parts(named[name], name)]
        lists = [(path, value) for path, value in parts if not isinstance(value, Tensor)]
        tensors = [(path, value) for path, value in parts if isinstance(value, Tensor)]
        in_lists = tuple([f"{path}[" for path, _ in lists])
        alone = [(path, _length(value)) for path, value in tensors if _length(value) and not path.startswith(in_lists)]
        self.batch, self.rows = [*alone, *[(path, len(value)) for path, value in lists], ("", 0)][0]
        empty = [path for path, value in tensors if value.is_nested or value.shape[:1] == (0,)]
        if empty and not self.rows:
            raise ValueError(
                f"the sample has no rows in {empty} that could be split: give it two or more, pad nested tensors to a "
                f"dense one, name in no_chunk what every micro-batch gets whole, or {GIVE_THEM}"
            )
        self.given: set[str] = set()
        self.see(sample)
        # No tensors, or every copy and pickle of the model would have the sample.
        self._lists = {path for path, _ in lists}
        #: For each path in the sample, whether it is split.
        self._split = {path: _length(value) == self.rows > 0 for path, value in parts}
        for path, value in lists:
            inner = [name for name in self._split if name.startswith(f"{path}[")]
            of_tensors = alone and all([isinstance(item, Tensor) or item is None for item in value])
            if self._split[path] and of_tensors and inner and all([self._split[name] for name in inner]):
                self._split[path] = False  # Each item has all rows.
            elif self._split[path]:
                self._split.update(dict.fromkeys(inner, False))

    def see(self, sample: Arguments) -> None:
        """Note the names of the arguments that a micro-batch of the sample gives."""
        self.given.update([name for name, value in self._named(sample) if value is not None])

    def names(self, arguments: Arguments) -> dict[str, Any]:
        """Return arguments by their names."""
        return dict(self._named(arguments))

    def tensors(self, arguments: Arguments) -> dict[str, Tensor]:
        """Return the tensors among arguments by their paths."""
        return dict(each(self.names(arguments), objects=True))

    def rows_of(self, arguments: Arguments) -> int:
        """Return the number of rows of a mini-batch; 0 if there is nothing to split."""
        parts = [part for name, value in self._chunked(arguments) for part in _parts(value, name)]
        split = [_length(value) for path, value in parts if self._split.get(path)]
        # What the sample does not have may have the rows, and what is passed whole has not.
        unknown = [_length(value) for path, value in parts if path not in self._split and _length(value)]
        return max(split) if split else next(iter(unknown), 0)

    def micro_batches(self, arguments: Arguments, chunks: int) -> SplitBatch:
        """Return a mini-batch in so many micro-batches, if it has the rows; in one if there is nothing to split.

        Micro-batches that the caller gives are those of the mini-batch.

        Raises:
            TypeError: one argument of several is `MicroBatches`.
        """
        window = arguments.window
        if window is not None or not self.splits:
            given = [arguments] if window is None else [arguments_of(batch) for batch in window]
            sizes = [rows_of(tuple(part), 1, objects=True) for part in given]
            return SplitBatch(self, given, sum(sizes) or 1, sizes, True, window)
        rows = self.rows_of(arguments)
        return SplitBatch(self, [arguments], rows, chunk_sizes(rows, chunks) if rows else [1])

    def split(self, arguments: Arguments, sizes: list[int]) -> list[Arguments]:
        """Return the arguments of each micro-batch.

        Args:
            arguments: those of a mini-batch
            sizes: the number of rows of each micro-batch

        Raises:
            ValueError: an argument that is split does not have the rows of the others, or the sample did not have it.
        """
        rows = sum(sizes)
        faults: list[str] = []
        named = [(name, value) for name, value in self._named(arguments) if self._split.get(name)]
        #: Rows and columns of what is split, as of ``input_ids``: integers of this size, as a mask, are rows as well.
        known = {value.shape[:2] for _, value in named if isinstance(value, Tensor) and value.dim() > 1}
        divide = partial(self._divide, sizes=sizes, known=known, faults=faults)
        parts = [
            [value] * len(sizes) if name in self._whole else spread(value, divide, len(sizes), name)
            for name, value in self._named(arguments)
        ]
        if faults:
            raise ValueError(
                f"the batch has {rows} rows in dimension 0, but {', '.join(faults)}; name in no_chunk what every "
                "micro-batch gets whole"
            )
        return [arguments.with_values(values) for values in zip(*parts)]

    def resized(self, sample: Arguments, rows: int) -> Arguments:
        """Return the sample with so many rows, some left out or repeated; what is passed whole stays as it is."""
        index = [k % max(1, self.rows) for k in range(rows)]

        def choose(value: Any, path: str) -> list[Any] | None:
            is_split = isinstance(value, (Tensor, list)) and self._split.get(path)
            return [_choose_rows(value, index)] if is_split else None

        named = self._named(sample)
        return sample.with_values(
            [value if name in self._whole else spread(value, choose, 1, name)[0] for name, value in named]
        )

    def changed(self, arguments: Arguments, change: Callable[[str, Tensor], Tensor]) -> Arguments:
        """Return arguments with every tensor that is split replaced by ``change(path, tensor)``."""

        def replaced(value: Any, path: str) -> list[Any] | None:
            return [change(path, value)] if isinstance(value, Tensor) and self._split.get(path) else None

        return arguments.with_values([spread(value, replaced, 1, name)[0] for name, value in self._named(arguments)])

    def decisions(self) -> str:
        """Say what is split and how, for errors."""
        items = [path for path in self._lists if self._split[path]]
        named = {path: is_split for path, is_split in self._split.items() if path not in self._lists}
        within = tuple([f"{item}[" for item in items])
        tensors = [path for path, is_split in named.items() if is_split and not path.startswith(within)]
        whole = [path for path, is_split in named.items() if not is_split]
        said = [f"split along dimension 0: {tensors}"] if tensors else []
        said += [f"lists with an item for each row (not so tuples, whose tensors are split): {items}"] if items else []
        said += [f"passed whole: {sorted({*whole, *self._whole})}"] if whole or self._whole else []
        return "; ".join(said) or "nothing is split"

    def unsplit(self, arguments: Arguments) -> str:
        """Say that nothing can be split, of what kinds the arguments are, and what to do."""
        kinds = [f"'{name}' is {_kind(value)}" for name, value in self._chunked(arguments) if value is not None]
        return (
            f"there is nothing to split ({', '.join(kinds) or 'no arguments'}); pass dense tensors with the rows in "
            "dimension 0, or lists with an item for each row, or several batches in torchgpipe.MicroBatches([...])"
        )

    def _named(self, arguments: Arguments) -> Iterator[tuple[str, Any]]:
        for k, value in enumerate(arguments.args):
            yield self._names[k] if k < len(self._names) else f"argument {k}", value
        yield from arguments.kwargs.items()

    def _chunked(self, arguments: Arguments) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in self._named(arguments) if name not in self._whole)

    def _divide(
        self, value: Any, path: str, sizes: list[int], known: Container[Sequence[int]], faults: list[str]
    ) -> list[Any] | None:
        """Return what each micro-batch gets of a value, or None if that is to be looked into.

        Args:
            value: the value
            path: its path
            sizes: the rows of each micro-batch
            known: the sizes of what has rows
            faults: takes what has another number of rows
        """
        rows, is_tensor = sum(sizes), isinstance(value, Tensor)
        if is_cache(value):
            return [_split_cache(value, rows, sizes, i) for i in range(len(sizes))]
        if not is_tensor and (type(value) is not list or not self._split.get(path, has_an_item_for_each(value, rows))):
            return None
        length = _length(value)
        wanted = self._split.get(path, length == rows)
        if not wanted or len(sizes) == 1 or (is_tensor and length <= 1 and rows != 1):  # A single row is broadcast.
            return [value] * len(sizes)
        is_like_another = is_tensor and not value.is_floating_point() and value.shape[:2] in known
        if path not in self._split and not self.on_meta and not is_like_another:
            raise ValueError(
                f"'{path}' has {length} items, as many as the batch has rows, but the sample did not have it, so "
                f"nothing tells whether they are rows; give pipelined a sample with it, or no_chunk=['{path}']"
            )
        if length != rows:
            faults.append(f"'{path}' has {length}" + ("" if is_tensor else " items, taken for the rows"))
            return [value] * len(sizes)
        return split_rows(value, sizes)


@dataclass(eq=False)
class SplitBatch:
    """A mini-batch, and the micro-batches that it is split into.

    Attributes:
        splitter: splits the arguments
        arguments: those of the mini-batch; of each micro-batch, if these are given
        rows: the number of its rows; 0 if there is nothing to split
        sizes: the rows of each micro-batch
        given: whether nothing is split
        window: what the caller gives the micro-batches in, if anything
    """

    splitter: Splitter
    arguments: list[Arguments]
    rows: int
    sizes: list[int]
    given: bool = False
    window: MicroBatches | None = None

    @cached_property
    def parts(self) -> list[Arguments]:
        """The arguments of each micro-batch."""
        is_split = self.rows and not self.given
        return self.splitter.split(self.arguments[0], self.sizes) if is_split else self.arguments

    @cached_property
    def named(self) -> list[dict[str, Any]]:
        """The arguments of each micro-batch by their names."""
        return [self.splitter.names(part) for part in self.parts]

    @cached_property
    def new_numbers(self) -> list[str]:
        """The names of the numbers among the arguments that the sample did not give."""
        known = {*self.splitter.given, "num_items_in_batch"}
        given = [item for named in (self.named if self.given else self.named[:1]) for item in named.items()]
        numbers = {
            name
            for name, value in given
            if type(value) in (int, float) or (isinstance(value, Tensor) and value.dim() == 0)
        }
        return sorted(numbers - known)

    @property
    def carried(self) -> CarriedCache | None:
        """What the micro-batches hand on, if they are chunks of one sequence."""
        return None if self.window is None else self.window.carried

    @property
    def weights(self) -> list[float] | None:
        """The weights that the caller gives with the micro-batches, or None."""
        return None if self.window is None else self.window.weights

    @property
    def whole(self) -> SplitBatch:
        """The same mini-batch as one micro-batch."""
        return replace(self, rows=0, sizes=[sum(self.sizes)])

    def mapped(self, change: Callable[[Tensor], Tensor], *, caches: bool = True) -> SplitBatch:
        """Return the mini-batch with changed arguments; see `Arguments.mapped`."""
        arguments = [part.mapped(change, caches=caches) for part in self.arguments]
        is_same = all([new is old for new, old in zip(arguments, self.arguments)])
        return self if is_same else replace(self, arguments=arguments)


def _is_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and not hasattr(value, "_fields")


def _parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(forward).parameters
    except (TypeError, ValueError):
        return {}


def _positional(forward: Callable[..., Any]) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in _parameters(forward).items() if parameter.kind in positional]


def _parts(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return the tensors and lists in an argument with their paths."""
    return [
        (inner, item) for inner, item in walk(value, path) if isinstance(item, Tensor) or (type(item) is list and item)
    ]


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a {type(value).__name__} of shape {tuple(value.shape)}, {value.layout}"


def _length(value: Any) -> int:
    """Return the rows of a tensor, or the items of a list; 0 for what cannot be split: numbers, sparse, nested."""
    if not isinstance(value, Tensor):
        return len(value)
    return len(value) if value.layout is torch.strided and not value.is_nested and value.dim() else 0


def _split_cache(value: Any, rows: int, sizes: list[int], i: int) -> Any:
    """Return the rows of micro-batch ``i`` of a cache, whose tensors are among its attributes."""

    def part(tensor: Tensor) -> Tensor:
        return torch.split(tensor, sizes)[i] if tensor.dim() and len(tensor) == rows > 0 else tensor

    return mapped(value, part, caches=True)


def _choose_rows(value: Any, index: list[int]) -> Any:
    """Return rows of a tensor, or items of a list, by their numbers; an item that is chosen again is varied."""
    if isinstance(value, Tensor):
        # Detached, or a backward would add gradients to what the caller's sample was made of.
        return value.detach()[index].requires_grad_(value.requires_grad)
    return [mapped(value[k], partial(vary_row, count=i if k in index[:i] else 0)) for i, k in enumerate(index)]


def vary_row(row: Tensor, count: int, largest: int = 0, *, mildly: bool = False) -> Tensor:
    """Return a row that has occurred ``count`` times before with other numbers of the same range.

    Args:
        row: the row
        count: how often it has occurred
        largest: the largest integer that may stand for others, where the integers of the row are all the same
        mildly: whether to leave each number as it is, and to put it elsewhere, if that makes a difference
    """
    if not count or row.is_meta or row.dtype is torch.bool or not row.numel():
        return row
    generator = torch.Generator().manual_seed(count)
    rolled = row.roll(count, 0) if row.dim() else row
    is_other = not torch.equal(rolled, row)
    if mildly and is_other:
        return rolled
    if not row.is_floating_point():
        if is_other:  # Drawn with others left out, or a sum over the row would not differ.
            return row[torch.randint(len(row), (len(row),), generator=generator, device="cpu").to(row.device)]
        return torch.randint(int(largest > 1), largest + 1, row.shape, generator=generator, device="cpu").to(row)
    noise = torch.rand(row.shape, generator=generator, device="cpu").to(row)
    # Of two sizes, so that what compares rows with their mean sees other rows in a micro-batch than in a mini-batch.
    return (rolled * (1 - noise / 2) if row.abs().max() > 1e-3 else noise / 10) / (1 + 3 * (count // 2))


def resized(value: Any, before: int, rows: int) -> Any:
    """Return a value, of which everything that has ``before`` rows is split, with ``rows`` of them."""
    index = [k % max(1, before) for k in range(rows)]
    if has_an_item_for_each(value, before):
        return _choose_rows(value, index)

    def choose(tensor: Tensor) -> Tensor:
        return _choose_rows(tensor, index) if _length(tensor) == before > 0 else tensor

    return mapped(value, choose, caches=True)
