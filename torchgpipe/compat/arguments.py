"""Split and gather values as :class:`~torchgpipe.pipe.Pipe` passes them on: a tuple is several arguments, of any type.

In `microbatch` all leaves are tensors or None. Here values of other types become a part of the structure around the
leaves, so that the engine needs no special case for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchgpipe.batch import microbatch
from torchgpipe.batch.microbatch import Batch, Inputs, NoChunk
from torchgpipe.devices.torch_internals import pytree

__all__ = ["PositionalInputs", "gather", "scatter"]


class PositionalInputs(Batch):
    """A value between two partitions; a tuple becomes the arguments of the next layer."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any, source: str) -> PositionalInputs:
        """Flatten a value.

        Args:
            value: a value of any type that contains a tensor
            source: the name of the producer, for the error

        Raises:
            TypeError: ``value`` contains no tensor.
        """
        if isinstance(value, Tensor):
            return cls((value,))
        leaves, spec = pytree.tree_flatten(pytree.tree_map(_fixed, value))
        if all(leaf is None for leaf in leaves):
            raise TypeError(f"{source} must have a tensor in it, but is {type(value).__name__} without one")
        return cls(tuple(leaves), spec)

    def pass_to(self, module: Callable[..., Any]) -> Any:
        """Call a module with the value, or with the items of a tuple as arguments, and return the output."""
        value = self.value
        if isinstance(value, tuple) and not isinstance(value, Inputs):
            return module(*value)
        return super().pass_to(module)


class _Fixed:
    """A container without leaves, which becomes ``value`` when the structure is unflattened."""

    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(
    _Fixed,
    lambda fixed: ([], fixed.value),
    lambda _, value: value,
    flatten_with_keys_fn=lambda fixed: ([], fixed.value),  # for the paths in errors
)


def _fixed(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, Tensor) else _Fixed(leaf)


def _passed(value: Any) -> Any:
    return value if isinstance(value, Tensor) else pytree.tree_map(_whole, value)


def _whole(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return NoChunk(leaf)
    return leaf if isinstance(leaf, NoChunk) else _fixed(leaf)


def scatter(
    inputs: tuple[Any, ...], chunks: int, device: torch.device | None, keywords: dict[str, Any] | None = None
) -> list[Batch]:
    """Split the tensors among the arguments of a pipeline. All other values go whole to every micro-batch.

    Args:
        inputs: tensors of shape (batch, ...), :class:`NoChunk`, and other values; tensors inside other values are not
            split
        chunks: the requested number of micro-batches
        device: the device to bring the micro-batches to; None to leave them where they are
        keywords: keyword arguments, of the same types

    Raises:
        TypeError: no argument is a tensor.
        ValueError: the sizes of the tensors differ in dimension 0, or a tensor has no dimensions.
    """
    keywords = keywords or {}
    values = [*inputs, *keywords.values()]
    if not any(isinstance(value, Tensor) for value in values):
        types = ", ".join(type(value).__name__ for value in values) or "nothing"
        raise TypeError(
            f"the input must have at least one tensor to split into micro-batches, but got {types}; pass each tensor "
            "as an argument of its own, as in model(x, y)"
        )
    batches = microbatch.scatter(
        tuple([_passed(value) for value in inputs]),
        chunks,
        device,
        {name: _passed(value) for name, value in keywords.items()},
    )
    return [PositionalInputs(batch.leaves, batch.spec) for batch in batches]


def gather(batches: list[Batch]) -> Any:
    """Concatenate the tensors that the last layer has returned, and list all other values by micro-batch.

    Returns:
        a tensor; or, for a tuple or a list, a tuple of the same length, in which each item is a tensor or a list with
        the value of each micro-batch

    Raises:
        ValueError: the outputs of the micro-batches differ in structure, or a tensor has no dimensions.
    """
    values = [batch.value for batch in batches]
    if isinstance(values[0], Tensor):
        return microbatch.gather(batches)
    rows = [value if isinstance(value, (tuple, list)) else (value,) for value in values]
    tensors = [tuple([item if isinstance(item, Tensor) else None for item in row]) for row in rows]
    gathered = microbatch.gather([Batch.of(row, "the output") for row in tensors])
    joined = tuple([list(items) if item is None else item for item, items in zip(gathered, zip(*rows))])
    return joined if isinstance(values[0], (tuple, list)) else joined[0]
