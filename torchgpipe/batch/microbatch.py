"""Split nested inputs into micro-batches, and gather nested outputs, those of a Sequential.

A value that travels through it is flattened once, into its leaves (tensors and None) and the structure
around them. Everything between two partitions works on the leaves.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchgpipe.batch.given import MicroBatches, verify_independent
from torchgpipe.devices.device import bring
from torchgpipe.devices.torch_internals import base_of, forward_mode_is_active, pytree, transforms_are_active
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.model.settings import verify_names
from torchgpipe.model.values import each
from torchgpipe.skip.namespace import SkipKey

__all__ = [
    "Batch",
    "Inputs",
    "NoChunk",
    "Skips",
    "WholeArguments",
    "chunk_sizes",
    "gather",
    "has_an_item_for_each",
    "rows_of",
    "scatter",
    "set_apart",
    "sizes_of",
    "split_rows",
    "tell_of_few",
    "values_of",
    "window_of",
]


class NoChunk:
    """Mark a tensor of the input that every micro-batch gets whole, such as a mask or a table.

    The gradient of the tensor is the sum over the micro-batches.

    Args:
        tensor: a tensor of any shape

    Raises:
        TypeError: ``tensor`` is not a tensor.

    Example::

        class Scale(nn.Module):
            def forward(self, input, weights):
                return input * weights

        model = GPipe(nn.Sequential(Scale(), nn.Linear(8, 2)), balance=[1, 1], chunks=4)
        output = model(torch.randn(16, 8), NoChunk(torch.rand(8)))
    """

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"NoChunk only supported for tensors, found: {tensor!r} ({type(tensor).__name__}); make it a tensor, "
                "or keep it as an attribute of the layer that needs it"
            )
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"NoChunk({tuple(self.tensor.shape)})"


class WholeArguments:
    """The arguments of the first layer that every micro-batch gets whole, by name.

    Args:
        names: their names, or one; ``'target'`` is that of a step
        layer: the first layer

    Attributes:
        names: their names

    Raises:
        ValueError: the layer takes no argument of such a name.
    """

    def __init__(self, names: str | Collection[str], layer: Callable[..., Any] | None) -> None:
        self.names = {*verify_names("no_chunk", names)}
        self._known = [*inspect.signature(getattr(layer, "forward", len)).parameters] if self.names else []
        unknown = sorted(self.names - {"target", *self._known})
        if unknown:
            raise ValueError(f"no_chunk names {unknown}, but the arguments of the first layer are {self._known}")

    def wrap(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with the tensors of these in `NoChunk`."""
        if self.names:
            named = [*zip_longest(self._known[: len(inputs)], inputs), *keywords.items()]
            values = [
                pytree.tree_map_only(Tensor, NoChunk, value) if name in self.names else value for name, value in named
            ]
            inputs, keywords = tuple(values[: len(inputs)]), dict(zip(keywords, values[len(inputs) :]))
        return inputs, keywords


#: Skips between their stash and their pop.
Skips: TypeAlias = dict[SkipKey, Leaf]


class Inputs(NamedTuple):
    """The arguments of the first layer, if they are not a single positional value."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]


class Batch:
    """A value between two partitions: its leaves, and the structure around them.

    Args:
        leaves: tensors and None
        spec: the containers around the leaves; None for a bare leaf

    Attributes:
        skips: skips in flight to a later layer, if any
    """

    __slots__ = ("leaves", "skips", "spec")

    def __init__(self, leaves: Leaves, spec: pytree.TreeSpec | None = None) -> None:
        self.leaves = leaves
        self.spec = spec
        self.skips: Skips | None = None

    @classmethod
    def of(cls, value: Any, source: str) -> Batch:
        """Flatten a value.

        Args:
            value: tensors and None in containers
            source: the name of the producer, for the error

        Raises:
            TypeError: a leaf is neither a tensor nor None.
        """
        if isinstance(value, Tensor):  # by far the most frequent case
            return cls((value,))
        leaves, spec = pytree.tree_flatten(value)
        for leaf in leaves:
            if not (leaf is None or isinstance(leaf, Tensor)):
                raise _unsupported(value, source, (Tensor, type(None)))
        return cls(tuple(leaves), spec)

    @property
    def value(self) -> Any:
        return self.leaves[0] if self.spec is None else pytree.tree_unflatten(self.leaves, self.spec)

    def replace(self, leaves: Leaves) -> Batch:
        """Return the same structure around other leaves, without skips."""
        return type(self)(leaves, self.spec)

    def pass_to(self, module: Callable[..., Any]) -> Any:
        """Call a module with the value, and return what the module returns."""
        value = self.value
        if isinstance(value, Inputs):
            return module(*value.positional, **value.keywords)
        return module(value)


def _unsupported(value: Any, source: str, allowed: tuple[type, ...]) -> TypeError:
    strangers = ", ".join(
        f"{path} is {type(leaf).__name__}" for path, leaf in _with_paths(value) if not isinstance(leaf, allowed)
    )
    return TypeError(
        f"{source} must consist of tensors and None in tuples, lists and dicts, but {strangers}; "
        "make it a tensor, or keep it as an attribute of the layer that needs it"
    )


def _with_paths(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its path: ``[0]`` and ``['mask']`` are a positional and a keyword input."""
    outer = 1 if isinstance(value, Inputs) else 0
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        yield pytree.keystr(tuple(path[outer:])) or "the value itself", leaf


def scatter(
    inputs: tuple[Any, ...], chunks: int, device: torch.device | None, keywords: dict[str, Any] | None = None
) -> list[Batch]:
    """Split a mini-batch along dimension 0 into at most ``chunks`` micro-batches, as :func:`torch.chunk` does.

    Args:
        inputs: the positional arguments of the pipeline: tensors of shape (batch, ...), None and
            :class:`NoChunk` in containers; or `MicroBatches`, which are there already
        chunks: the requested number of micro-batches
        device: the device to move the micro-batches to; None to leave them where they are
        keywords: the keyword arguments of the pipeline, of the same kinds

    Raises:
        TypeError: a leaf has another type or is sparse or nested, or no leaf is a tensor to split.
        ValueError: the sizes of the tensors differ in dimension 0, a tensor has no dimensions, or several
            `MicroBatches` differ in number.
    """
    value = inputs[0] if len(inputs) == 1 and not keywords else Inputs(inputs, keywords or {})
    if isinstance(value, Tensor) and value.dim() > 0 and _is_dense(value):
        return [Batch((chunk,)) for chunk in _whole(value, device).chunk(chunks)]

    leaves, spec = pytree.tree_flatten(value)
    if any([isinstance(leaf, MicroBatches) for leaf in leaves]):
        return _given(value, leaves, spec, device)
    if not all(leaf is None or isinstance(leaf, (Tensor, NoChunk)) for leaf in leaves):
        raise _unsupported(value, "input", (Tensor, NoChunk, type(None)))
    _check_batch_sizes(value, leaves)

    m = next(len(leaf.chunk(chunks)) for leaf in leaves if isinstance(leaf, Tensor))
    moved = [_whole(leaf, device) for leaf in leaves]
    columns = [to.chunk(chunks) if isinstance(leaf, Tensor) else [to] * m for leaf, to in zip(leaves, moved)]
    return [Batch(row, spec) for row in zip(*columns)]


def _given(value: Any, leaves: list[Any], spec: pytree.TreeSpec, device: torch.device | None) -> list[Batch]:
    """Return micro-batches that the caller gives.

    Raises:
        TypeError: a tensor is neither among them nor in `NoChunk`, or a leaf of a micro-batch has another type.
        ValueError: arguments have different numbers of micro-batches.
    """
    windows = [leaf for leaf in leaves if isinstance(leaf, MicroBatches)]
    for window in windows:
        verify_independent(window, "GPipe")
    counts = [*map(len, windows)]
    if len(set(counts)) > 1:
        raise ValueError(f"the arguments have different numbers of MicroBatches: {counts}; give as many in each")
    if not all([leaf is None or isinstance(leaf, (MicroBatches, NoChunk)) for leaf in leaves]):
        others = [path for path, leaf in _with_paths(value) if isinstance(leaf, Tensor)]
        raise TypeError(
            f"an argument is MicroBatches, but {others or 'others'} are not; give MicroBatches in each, and wrap in "
            "NoChunk what every micro-batch gets whole"
        )

    def batch(i: int) -> Batch:
        row = [leaf[i] if isinstance(leaf, MicroBatches) else leaf for leaf in leaves]
        one = pytree.tree_map(lambda leaf: _whole(leaf, device), pytree.tree_unflatten(row, spec))
        return Batch.of(one, f"micro-batch {i}")

    return [batch(i) for i in range(counts[0])]


def window_of(value: Any) -> MicroBatches | None:
    """Return the first `MicroBatches` among arguments, or None if a mini-batch is to be split."""
    if isinstance(value, Tensor):
        return None
    return next((leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, MicroBatches)), None)


def rows_of(value: Any, otherwise: int = 0, *, objects: bool = False) -> int:
    """Return the size of dimension 0 of the first tensor in ``value`` that has dimensions, if there is one.

    Args:
        value: a value
        otherwise: what to return if there is none
        objects: whether to look into plain objects as well
    """
    return next((tensor.size(0) for _, tensor in each(value, objects=objects) if tensor.dim()), otherwise)


def sizes_of(value: Any, chunks: int) -> list[int]:
    """Return the rows of each micro-batch of a mini-batch, given how many it is split into; 1 if nothing has rows."""
    window = window_of(value)
    if window is not None:
        return [rows_of(batch, 1) for batch in window]
    return chunk_sizes(rows_of(value), chunks)


def chunk_sizes(rows: int, chunks: int) -> list[int]:
    """Return the sizes of the parts into which `torch.chunk` splits so many rows."""
    return [len(part) for part in torch.empty(rows, device="meta").chunk(chunks)]


def has_an_item_for_each(value: Any, rows: int) -> bool:
    """Return whether this is a list with an item for each of so many rows, as far as its length and items tell."""
    if type(value) is not list or len(value) != rows:
        return False
    items = [item for item in value if item is not None]
    return not items or not all([isinstance(item, Tensor) and _has_rows(item, rows) for item in items])


def split_rows(value: Any, sizes: list[int]) -> list[Any]:
    """Return the rows of a tensor, or the items of a list, for each micro-batch."""
    if isinstance(value, Tensor):
        parts = torch.split(value, sizes)
        if value.requires_grad and torch.is_grad_enabled():
            return list(parts)
        # Each with a version of its own: a model may change its input in place, and so no other micro-batch's. Under
        # no_grad() a model may turn gradients on and differentiate its input, which has to be a leaf then.
        return [part.data.requires_grad_(value.requires_grad) for part in parts]
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return [value[end - size : end] for end, size in zip(ends, sizes)]


def _has_rows(tensor: Tensor, rows: int) -> bool:
    return tensor.dim() > 0 and _is_dense(tensor) and len(tensor) == rows


def tell_of_few(rows: int, chunks: int, stacklevel: int) -> None:
    """Warn if a mini-batch has fewer rows than it should have micro-batches.

    Only the first mini-batch in training is worth a word: the last one of an epoch is often short, and generating text
    takes single rows.

    Args:
        rows: the rows of the mini-batch; 0 if they are not known
        chunks: the requested number of micro-batches
        stacklevel: as for :func:`warnings.warn`, from the caller of this function on
    """
    if 0 < rows < chunks:
        warnings.warn(
            f"a mini-batch of {rows} row{'s' * (rows > 1)} makes only {rows} micro-batch{'es' * (rows > 1)} instead of "
            f"chunks={chunks}, so devices idle; give larger mini-batches, several at once in "
            f"torchgpipe.MicroBatches([...]), as where gradients are accumulated, or chunks={rows}",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def _whole(leaf: Any, device: torch.device | None) -> Any:
    """Return a tensor, or the one in `NoChunk`, on the device; anything else as it is."""
    tensor = leaf.tensor if isinstance(leaf, NoChunk) else leaf
    return bring(tensor, device) if isinstance(tensor, Tensor) and device is not None else tensor


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _check_batch_sizes(value: Any, leaves: list[Any]) -> None:
    split = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not split:
        raise TypeError("input has no tensor to split into micro-batches; pass at least one that is not in NoChunk")
    if not all(map(_is_dense, split)):
        others = ", ".join(
            f"{path} is {'nested' if leaf.is_nested else leaf.layout} ({type(leaf).__name__})"
            for path, leaf in _with_paths(value)
            if isinstance(leaf, Tensor) and not _is_dense(leaf)
        )
        raise TypeError(
            f"input has tensors that PyTorch cannot split along dimension 0: {others}; make them dense, as by padding, "
            "or wrap those to be passed whole to every micro-batch in NoChunk"
        )
    sizes = {leaf.shape[0] if leaf.dim() else None for leaf in split}
    if len(sizes) == 1 and None not in sizes:
        return
    shapes = ", ".join(
        f"{path} is {tuple(leaf.shape)}" for path, leaf in _with_paths(value) if isinstance(leaf, Tensor)
    )
    raise ValueError(
        f"all tensors of the input must have the same size in dimension 0, the batch, but {shapes}; "
        "wrap those to be passed whole to every micro-batch in NoChunk"
    )


def set_apart(batches: Sequence[Batch]) -> None:
    """Give the parts of one tensor versions of their own, so that a layer may change its input in place.

    The last micro-batch keeps the version of the mini-batch: by that its backward, which comes first, notices that the
    caller has changed the mini-batch since forward. What goes whole to every micro-batch stays as it is.
    """
    if transforms_are_active() or forward_mode_is_active():
        return  # They would lose the tensor.
    *others, last = batches
    bases = {id(base): leaf for leaf in last.leaves if leaf is not None and (base := base_of(leaf)) is not None}
    for batch in others if bases else ():
        batch.leaves = tuple(
            [x if x is None or x.requires_grad or bases.get(id(base_of(x)), x) is x else x.data for x in batch.leaves]
        )


def gather(batches: list[Batch], source: str = "the last layer") -> Any:
    """Concatenate the outputs of the micro-batches along dimension 0, leaf by leaf.

    The result has contiguous memory of its own, even if there is one micro-batch. Otherwise the size of the mini-batch
    would decide whether the result can be viewed, and whether writing to it changes the caller's input.

    Args:
        batches: the outputs
        source: the name of the producer, for the error

    Raises:
        ValueError: the outputs of the micro-batches differ in structure, or a tensor has no dimensions, and there are
            several micro-batches.
    """
    first = batches[0]
    for i, batch in enumerate(batches):
        if batch.spec != first.spec or [x is None for x in batch.leaves] != [x is None for x in first.leaves]:
            raise ValueError(
                f"{source} returned {_describe(first)} for micro-batch 0 but {_describe(batch)} for "
                f"micro-batch {i}; return the same structure for each"
            )
    return Batch(tuple(map(_concatenate, zip(*(batch.leaves for batch in batches)))), first.spec).value


def values_of(batches: list[Batch]) -> list[Any]:
    """Return the outputs of micro-batches that the caller gives, which are not gathered."""
    return [batch.value for batch in batches]


def _concatenate(column: tuple[Any, ...]) -> Leaf:
    first: Leaf = column[0]
    if first is None:
        return None
    if first.dim() == 0:
        if len(column) == 1:
            return first.clone()
        raise ValueError(
            "the last layer returned a tensor without dimensions, which cannot be joined along dimension 0, the "
            "batch; keep the batch dimension and reduce outside the pipeline, or return a tensor of shape (1,)"
        )
    return torch.cat(column)


def _describe(batch: Batch) -> str:
    return str(pytree.tree_map(lambda leaf: None if leaf is None else "*", batch.value))
