"""Read the keys of a ``state_dict`` that a predecessor wrote.

The original GPipe and fairscale put the number of the partition before the name of a layer in the model:
``partitions.<j>.<name>``. A misread key would load wrong weights, and two keys that become one would lose a tensor. So
a file that does not fit is an error, whether loading is strict or not. PyTorch's Pipe counted the layers of each
partition from 0, ``partitions.<j>.<k>``; such keys are the caller's to rename.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

__all__ = ["OldKey", "by_name", "take_old_keys"]


class OldKey(NamedTuple):
    """An old key and its parts.

    Attributes:
        key: the key in the ``state_dict``
        j: the number of the partition
        name: the rest of the key, after that number
    """

    key: str
    j: int
    name: str


def take_old_keys(
    state_dict: dict[str, Any],
    prefix: str,
    read: Callable[[list[OldKey]], Mapping[str, str]],
    error_msgs: list[str],
) -> None:
    """Rename the old keys of a pipeline.

    Args:
        state_dict: the dict whose keys are renamed in place
        prefix: the prefix of all keys of the pipeline
        read: a function that returns the new name of each old key, without the prefix, or raises ValueError
        error_msgs: the list to append to if nothing is renamed; see :meth:`torch.nn.Module.load_state_dict`
    """
    start = prefix + "partitions."
    parts = [(key, *key[len(start) :].partition(".")) for key in state_dict if key.startswith(start)]
    keys = [OldKey(key, int(j), name) for key, j, _, name in parts if j.isdecimal() and name]
    try:
        names = read(keys)
        for old, new in names.items():
            if prefix + new in state_dict:
                raise ValueError(f"'{old}' would become '{prefix + new}', which exists as well")
    except ValueError as error:
        error_msgs.append(
            f"the keys '{start}...' do not fit: {error}; rename them to those of the plain model. PyTorch's Pipe has "
            "the same tensors in the same order: load dict(zip(model.state_dict(), state_dict.values(), strict=True))"
        )
        return
    for old, new in names.items():
        state_dict[prefix + new] = state_dict.pop(old)


def by_name(keys: Sequence[OldKey], layers: Sequence[str]) -> dict[str, str]:
    """Return the new name of each key in a file of the original GPipe.

    Args:
        keys: the old keys
        layers: the names of the layers, in order

    Raises:
        ValueError: a layer would be in two partitions, so that two keys may become one; or the partitions are not in
            the order of the layers.
    """
    firsts: dict[str, OldKey] = {}
    for old in keys:
        layer = _layer_of(old, layers)
        first = firsts.setdefault(layer, old)
        if first.j != old.j:
            raise ValueError(f"'{first.key}' and '{old.key}' would both be of layer '{layer}', in two partitions")
    for before, after in pairwise([firsts[layer] for layer in layers if layer in firsts]):
        if after.j < before.j:
            raise ValueError(f"'{before.key}' would be of an earlier layer than '{after.key}', in a later partition")
    return {old.key: old.name for old in keys}


def _layer_of(old: OldKey, layers: Sequence[str]) -> str:
    return next((layer for layer in layers if old.name.startswith(f"{layer}.")), old.name.partition(".")[0])
