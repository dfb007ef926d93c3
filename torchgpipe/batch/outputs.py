"""Joining the outputs of micro-batches into one output of the same structure.

What has the rows of the batch is concatenated. Numbers, such as a loss, are added up or averaged. What has nothing to
do with the batch is that of the first micro-batch. How an output depends on the rows is seen from two runs of the
sample, the second with a row less; if it couples the rows with each other, there is no way to join it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from torchgpipe.model.values import Container, container, dotted, each, is_cache, walk
from torchgpipe.processes.stand_in import StandIn

__all__ = [
    "CacheOfMicroBatches",
    "JoinScalar",
    "Kinds",
    "are_equal",
    "find_kinds",
    "find_path_of_loss",
    "join",
    "own_loss",
    "verify_known",
]

#: For each output, the dimension of the rows; None if it has nothing to do with them, 'coupled' if it couples them, and
#: 'counts' if it is a number of Python that depends on how many there are.
Kinds: TypeAlias = dict[str, int | Literal["coupled", "counts"] | None]

#: Joins tensors without dimensions, such as losses, given the path of the output.
JoinScalar: TypeAlias = Callable[[str, Sequence[Tensor]], Tensor]


def own_loss(output: Any) -> Any:
    """Return the loss in a model's output: its ``loss``, the number that it is, or the first of a tuple; or None."""
    first = output[0] if type(output) is tuple and output else output
    if isinstance(first, Tensor):
        return first if first.dim() == 0 and first.is_floating_point() else None
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def find_path_of_loss(output: Any) -> str:
    """Return the path of what `own_loss` returns."""
    return "value" if isinstance(output, Tensor) else "[0]" if type(output) is tuple else "loss"


def find_kinds(output: Any, rows: int, twin_output: Any, twin_rows: int) -> Kinds:
    """Return how outputs depend on the rows.

    Args:
        output: the output for ``rows`` rows
        rows: a number of rows
        twin_output: the output for ``twin_rows`` rows
        twin_rows: another number of rows
    """
    kinds: Kinds = {}
    twins = {path or "value": item for path, item in walk(twin_output)}
    for path, item in walk(output):
        path = path or "value"
        twin: Any = twins.get(path)
        if isinstance(item, Tensor) and isinstance(twin, Tensor):
            if 0 < item.dim() == twin.dim() and not item.is_nested and not twin.is_nested:
                kinds[path] = _kind_of(item.shape, rows, twin.shape, twin_rows)
        elif type(item) in (list, tuple) and type(twin) in (list, tuple):
            follows = len(item) * twin_rows == len(twin) * rows and len(item) != len(twin)
            kinds[path] = 0 if follows else None
        elif type(item) in (int, float) and type(twin) in (int, float) and item != twin:
            kinds[path] = "counts"
    return kinds


def _kind_of(shape: Sequence[int], rows: int, twin: Sequence[int], twin_rows: int) -> int | Literal["coupled"] | None:
    """Return how a tensor depends on the rows; see `Kinds`."""
    varying = [d for d in range(len(shape)) if shape[d] != twin[d]]
    if not varying:
        return None
    (dim, *more) = varying
    return dim if not more and shape[dim] * twin_rows == twin[dim] * rows else "coupled"


def verify_known(output: Any) -> None:
    """Check that tensors with a graph are only where `join` finds them.

    Raises:
        TypeError: an object of an unknown class has a tensor that requires grad.
    """
    for path, item in walk(output):
        is_known = isinstance(item, Tensor) or is_cache(item) or container(item) is not None
        for _, tensor in () if is_known else each(item, objects=True):
            if tensor.requires_grad:
                raise TypeError(
                    f"the output '{path or 'value'}' is {type(item).__name__}, whose tensor of shape "
                    f"{tuple(tensor.shape)} would get no gradient; return the tensors in a dict, a tuple or a "
                    "dataclass, or use model.step with a loss_fn"
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
    return outputs[0] if len(outputs) == 1 else _Joiner(sizes, kinds, scalar).join(list(outputs), "")


class _Joiner:
    def __init__(self, sizes: Sequence[int], kinds: Kinds, scalar: JoinScalar) -> None:
        self._sizes, self._kinds, self._scalar = sizes, kinds, scalar
        #: A tensor that occurs twice in the output is joined once.
        self._done: dict[tuple[int, ...], Tensor] = {}

    def join(self, values: list[Any], path: str) -> Any:
        first = values[0]
        if all([isinstance(value, Tensor) for value in values]):
            key = tuple(map(id, values))
            if key not in self._done:
                self._done[key] = self._tensor(values, path or "value")
            return self._done[key]
        containers = _open_all(values)
        if containers is None:
            return self._of_no_container(values, path)
        if type(first) in (list, tuple) and self._has_rows(values, path or "value"):
            return type(first)([item for value in values for item in value])
        names = containers[0].names
        if any([opened.names != names for opened in containers]):
            raise _differs(path, [f"{len(opened.names)} items {opened.names[:4]}" for opened in containers])
        items = zip(*[opened.items for opened in containers])
        return containers[0].rebuilt(
            [self.join(list(values), dotted(path, name)) for name, values in zip(names, items)]
        )

    def _of_no_container(self, values: list[Any], path: str) -> Any:
        first = values[0]
        if any([type(value) is not type(first) for value in values]):
            raise _differs(path, [type(value).__name__ for value in values])
        if is_cache(first):
            return CacheOfMicroBatches()
        path = path or "value"
        counts = self._kinds.get(path) == "counts"
        if counts or not all([_is_known_equal(value, first) for value in values]):
            depends = "depends on the rows" if counts else "differs between micro-batches"
            raise TypeError(
                f"the output '{path}' is {type(first).__name__}, which {depends} and cannot be joined; return a tensor "
                "with a value for each row, or use model.step, whose loss_fn gets the output of each micro-batch"
            )
        return first

    def _has_rows(self, values: list[Any], path: str) -> bool:
        """Return whether a list has an item for each row, such as the boxes of each image.

        Raises:
            ValueError: the sample did not have this list, and its length tells nothing.
        """
        if path in self._kinds:
            return self._kinds[path] == 0
        sizes = self._sizes
        if any([len(value) != size for value, size in zip(values, sizes)]):
            return False
        if all([self._is_split(item, size) for value, size in zip(values, sizes) for item in value]):
            return False  # Each item has the rows.
        raise ValueError(
            f"the output '{path}' has {len(values[0])} items in micro-batches of {sizes[0]} rows, and the sample had "
            "no such output, so whether an item is a row cannot be told; give pipelined a sample that returns it"
        )

    def _is_split(self, value: Any, size: int) -> bool:
        tensors = [tensor for _, tensor in each(value)]
        return bool(tensors) and all([tensor.dim() > 0 and len(tensor) == size for tensor in tensors])

    def _tensor(self, values: list[Tensor], path: str) -> Tensor:
        first = values[0]
        if first.dim() == 0:
            return self._scalar(path, values)
        dim = self._kinds[path] if path in self._kinds else self._dimension(values, path)
        if dim is None:
            if are_equal(values):
                return first
            raise ValueError(
                f"the output '{path}' of shape {tuple(first.shape)} has no dimension with the rows of the batch, and "
                "differs between micro-batches, so it cannot be joined; return a value for each row, or a number, or "
                "use model.step, whose loss_fn gets the output of each micro-batch"
            )
        shapes = [tuple(tensor.shape) for tensor in values]
        if isinstance(dim, str):
            raise ValueError(
                f"the output '{path}' has shapes {shapes} in the micro-batches, and couples the rows of a batch, so it "
                "cannot be joined; use model.step with a loss_fn that takes the output of a micro-batch, or chunks=1"
            )
        if any([len(shape) != first.dim() or _without(shape, dim) != _without(first.shape, dim) for shape in shapes]):
            raise _differs(path, [str(shape) for shape in shapes])
        return torch.cat(values, dim)

    def _dimension(self, values: list[Tensor], path: str) -> int | None:
        """Return the dimension of the rows of an output that the sample did not have."""
        lengths = [len(tensor) for tensor in values]
        factor = lengths[0] // self._sizes[0]
        if factor and lengths == [factor * size for size in self._sizes]:
            return 0
        if are_equal(values):
            return None
        raise _differs(path, [str(tuple(tensor.shape)) for tensor in values])


def _is_known_equal(a: Any, b: Any) -> bool:
    """Return whether two objects are equal; arrays, and objects that hold tensors, do not tell by a truth value."""
    try:
        return a is b or bool(a == b)
    except (RuntimeError, ValueError):
        return False


def are_equal(values: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal. The host waits once, as this may come between forward and backward."""
    first = values[0]
    rest = [tensor for tensor in values if tensor is not first]
    if any([tensor.shape != first.shape for tensor in rest]):
        return False
    if isinstance(first, StandIn):  # The process that has them compares.
        return True
    return not rest or bool(torch.stack([(tensor == first).all() for tensor in rest]).all())


def _open_all(values: Sequence[Any]) -> list[Container] | None:
    """Open values; return None unless all are containers of one kind."""
    opened = [container(value) for value in values]
    containers = [value for value in opened if value is not None]
    are_alike = len(containers) == len(values) and len({value.kind for value in containers}) == 1
    return containers if are_alike else None


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _differs(path: str, shown: list[str]) -> ValueError:
    return ValueError(
        f"the output '{path or 'value'}' differs between micro-batches ({', '.join(shown)}), so it cannot be joined; "
        "pad the batch so that all micro-batches are alike, or use model.step, whose loss_fn gets each of them"
    )


class CacheOfMicroBatches:
    """Stands for the caches of micro-batches, which decoders return in training by default."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"'{name}' of a cache that a pipelined model has returned: each micro-batch had a cache of its own, and "
            "these are not joined; call the model under torch.no_grad() with use_cache=True, which gives one cache"
        )
