"""Verify the settings that all pipelines share: chunks and checkpoint."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, Literal, TypeAlias

__all__ = [
    "CheckpointMode",
    "LayerNames",
    "checkpoint_stop",
    "fixed",
    "verify_checkpoint",
    "verify_checkpoint_or_layers",
    "verify_chunks",
    "verify_names",
    "verify_number",
]

#: Which micro-batches are checkpointed: all, all but the last, or none.
CheckpointMode: TypeAlias = Literal["always", "except_last", "never"]
#: The layers that are checkpointed. No Sequence, because a string is one, and a misspelt mode would be well typed.
LayerNames: TypeAlias = list[str] | tuple[str, ...]


def verify_chunks(chunks: Any) -> int:
    """Return the number of micro-batches as an int.

    Args:
        chunks: an integer of Python or NumPy, an integer tensor with one element, or a whole float, as ``batch / 4`` is

    Raises:
        TypeError: ``chunks`` is not an integer.
        ValueError: ``chunks`` is below 1.
    """
    whole = int(chunks) if isinstance(chunks, float) and chunks.is_integer() else chunks
    return verify_number("number of chunks", whole, positive=True)


def verify_number(name: str, number: Any, *, positive: bool = False) -> int:
    """Return a setting as an int.

    Raises:
        TypeError: it is something else, such as text or a truth value.
        ValueError: it is not positive, and has to be.
    """
    message = f"{name} must be {'positive' if positive else 'an'} integer, but got {number!r}"
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(message)
    if positive and number < 1:
        raise ValueError(message)
    return operator.index(number)


def verify_names(name: str, names: Any) -> list[str]:
    """Return a setting as a list of names, given a list or one name.

    Raises:
        TypeError: it is something else.
    """
    found = [names] if isinstance(names, str) else [*names] if isinstance(names, Collection) else [names]
    if not all([isinstance(one, str) for one in found]):
        raise TypeError(f"{name} must be a list of names, such as ['x'], but got {names!r}")
    return found


def verify_checkpoint(checkpoint: Any) -> CheckpointMode:
    """Return the checkpoint mode that ``checkpoint`` is, or that it is called as text.

    Args:
        checkpoint: a mode, an object such as an item of an enumeration whose text is one, or whether to checkpoint

    Raises:
        ValueError: ``checkpoint`` is not one.
    """
    if isinstance(checkpoint, bool):
        return "always" if checkpoint else "never"
    modes: tuple[CheckpointMode, ...] = ("always", "except_last", "never")
    for mode in modes:
        if mode in (checkpoint, str(checkpoint)):
            return mode
    raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never', but {checkpoint!r}")


def verify_checkpoint_or_layers(
    checkpoint: CheckpointMode | LayerNames | bool, layers: Collection[str]
) -> CheckpointMode | tuple[str, ...]:
    """Return a checkpoint mode, or the names of the layers to checkpoint.

    Args:
        checkpoint: a mode, names, or whether to checkpoint
        layers: the names of all layers

    Raises:
        ValueError: ``checkpoint`` is no mode, or a layer of such a name does not exist.
    """
    if not isinstance(checkpoint, (list, tuple)):
        return verify_checkpoint(checkpoint)
    unknown = [name for name in checkpoint if name not in layers]
    if unknown:
        raise ValueError(f"checkpoint names {unknown}, but the layers of the pipeline are {[*layers]}")
    return tuple(checkpoint)


def fixed(owner: object, name: str, remedy: str) -> AttributeError:
    """Return the error for an attribute of ``owner`` that only its constructor sets.

    Args:
        owner: a pipeline
        name: the attribute
        remedy: the instruction for the user
    """
    kind = type(owner).__name__
    return AttributeError(f"{name} of a {kind} cannot be set, because its layers are in their places already; {remedy}")


def checkpoint_stop(checkpoint: Any, m: int) -> int:
    """Return how many of ``m`` micro-batches, from the first on, are checkpointed in training.

    Raises:
        ValueError: ``checkpoint`` is not a checkpoint mode.
    """
    return {"always": m, "except_last": m - 1, "never": 0}[verify_checkpoint(checkpoint)]
