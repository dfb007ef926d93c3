"""Read the keys of a ``state_dict`` that a predecessor wrote.

The original GPipe and fairscale put the number of the partition before the name of a layer in the model:
``partitions.<j>.<name>``. A misread key would load wrong weights, and two keys that become one would lose a tensor. So
a file that does not fit is an error, whether loading is strict or not. PyTorch's Pipe counted the layers of each
partition from 0, ``partitions.<j>.<k>``; such keys are the caller's to rename.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

__all__ = ["take_old_keys"]


def take_old_keys(state_dict: dict[str, Any], prefix: str, layers: Sequence[str] | None, error_msgs: list[str]) -> None:
    """Rename the old keys of a pipeline.

    Args:
        state_dict: the dict whose keys are renamed in place
        prefix: the prefix of all keys of the pipeline
        layers: the names of the layers, in order; None if old keys are those of PyTorch's Pipe
        error_msgs: the list to append to if nothing is renamed; see :meth:`torch.nn.Module.load_state_dict`
    """
    start, names, firsts = f"{prefix}partitions.", dict[str, str](), dict[str, tuple[str, int]]()
    try:
        for key in state_dict:
            j, _, name = key[len(start) :].partition(".")
            if not (key.startswith(start) and j.isdecimal() and name):
                continue
            if layers is None:
                raise ValueError("a Pipe's count the layers of each partition from 0")
            layer = next((layer for layer in layers if name.startswith(f"{layer}.")), name.partition(".")[0])
            first, first_j = firsts.setdefault(layer, (key, int(j)))
            if first_j != int(j):
                raise ValueError(f"'{first}' and '{key}' would both be of layer '{layer}', in two partitions")
            if prefix + name in state_dict:
                raise ValueError(f"'{key}' would become '{prefix + name}', which exists as well")
            names[key] = prefix + name
        for (before, i), (after, k) in pairwise([firsts[layer] for layer in layers or () if layer in firsts]):
            if k < i:
                raise ValueError(f"'{before}' would be of an earlier layer than '{after}', in a later partition")
    except ValueError as error:
        error_msgs.append(
            f"the keys '{start}...' do not fit: {error}; rename them to those of the plain model. PyTorch's Pipe has "
            "the same tensors in the same order: load dict(zip(model.state_dict(), state_dict.values(), strict=True))"
        )
        return
    for old, new in names.items():
        state_dict[new] = state_dict.pop(old)
