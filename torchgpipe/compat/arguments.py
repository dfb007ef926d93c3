"""Values as :class:`~torchgpipe.pipe.Pipe` hands them from layer to layer: a tuple is several arguments, of any type.

In `microbatch` all leaves are tensors or None. Here all others become a part of the structure around the leaves, so
that the pipeline carries them along without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchgpipe.model import microbatch
from torchgpipe.model.microbatch import Batch, Inputs, NoChunk

__all__ = ["Arguments", "gather", "scatter"]


class Arguments(Batch):
    """A value between two layers, of which a tuple is the arguments of the next one."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any, source: str) -> Arguments:
        """Takes a value apart.

        Args:
            value: anything with a tensor in it
            source: who has produced it, for the error

        Raises:
            TypeError: there is no tensor in it.
        """
        if isinstance(value, Tensor):
            return cls((value,))
        leaves, spec = pytree.tree_flatten(pytree.tree_map(_fixed, value))
        if all(leaf is None for leaf in leaves):
            raise TypeError(f"{source} must have a tensor in it, but is {type(value).__name__} without one")
        return cls(tuple(leaves), spec)

    def pass_to(self, module: nn.Module) -> Any:
        """Call a module with the value, of which a tuple is several arguments, and return what the module returns."""
        value = self.value
        if isinstance(value, tuple) and not isinstance(value, Inputs):
            return module(*value)
        return super().pass_to(module)


class _Fixed:
    """A container of nothing, which becomes ``value`` when the structure is filled again."""

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
    inputs: tuple[Any, ...], chunks: int, device: torch.device, keywords: dict[str, Any] | None = None
) -> list[Batch]:
    """Splits the tensors among the arguments of a pipeline. All else goes whole to every micro-batch.

    Args:
        inputs: tensors of shape (batch, ...), :class:`NoChunk`, and anything else; tensors inside of that are not split
        chunks: the wanted number of micro-batches
        device: where the micro-batches are wanted
        keywords: keyword arguments, of the same kinds

    Raises:
        TypeError: no argument is a tensor.
        ValueError: the tensors differ in dimension 0, or have none.
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
    return [Arguments(batch.leaves, batch.spec) for batch in batches]


def gather(batches: list[Batch]) -> Any:
    """Concatenates the tensors that the last layer has returned, and lists all else by micro-batch.

    Returns:
        a tensor, or for a tuple or a list a tuple with, at each place, a tensor or the list of what was returned there

    Raises:
        ValueError: the micro-batches came out in different structures, or a tensor has no dimension 0.
    """
    values = [batch.value for batch in batches]
    if isinstance(values[0], Tensor):
        return microbatch.gather(batches)
    rows = [value if isinstance(value, (tuple, list)) else (value,) for value in values]
    tensors = [tuple([item if isinstance(item, Tensor) else None for item in row]) for row in rows]
    gathered = microbatch.gather([Batch.of(row, "the output") for row in tensors])
    joined = tuple([list(items) if item is None else item for item, items in zip(gathered, zip(*rows))])
    return joined if isinstance(values[0], (tuple, list)) else joined[0]
