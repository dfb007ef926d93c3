"""Counts what a pipeline keeps for backward, without computing or storing anything: on the meta device.

With checkpointing a partition keeps its input of each micro-batch, and all that its layers save for backward of the one
micro-batch that is differentiated:

    input of micro-batch   0   1   2   ...   m-1     with the skips that come through a portal
    saved of micro-batch                     m-1     in backward that of m-2, of m-3, ... in its place

The layers run once, on a micro-batch of tensors that have a shape and no data. What autograd saves is counted once for
each storage, without parameters and buffers, which are there anyway, and without the input. Temporaries of operations
and workspaces of libraries are not counted, so the peak of a device lies above what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.models.skips import Stash

__all__ = ["Kept", "kept_by_partitions"]


class Kept(NamedTuple):
    """Bytes of a partition.

    Attributes:
        parameters: of the partition
        input: of a micro-batch
        saved: for backward of a micro-batch, beside its input
    """

    parameters: int
    input: int
    saved: int


def kept_by_partitions(model: nn.Sequential, sample: Sequence[int], balance: Sequence[int], rows: int) -> list[Kept]:
    """Return the bytes of each partition.

    Args:
        model: one of `benchmarks.models`, on the meta device
        sample: the shape of an image
        balance: the number of layers in each partition
        rows: the images of a micro-batch

    Raises:
        ValueError: the balance is not one of the model.
    """
    x: Any = torch.empty(rows, *sample, device="meta")
    if sum(balance) != len(model):
        raise ValueError(f"the balance has {sum(balance)} layers, but the model {len(model)}")
    kept, rest = [], iter(model)
    stashed: dict[Any, tuple[int, Tensor]] = {}
    for j, size in enumerate(balance):
        layers = list(islice(rest, size))
        state = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
        inputs = [*(x if isinstance(x, tuple) else (x,))]
        saved: list[Tensor] = []
        for layer in layers:
            if isinstance(layer, Stash):
                stashed[_skip(layer)] = j, x
            elif hasattr(layer, "poppable_names"):
                home, skip = stashed.pop(_skip(layer))
                inputs += [skip] if home != j else []
            with saved_tensors_hooks(_into(saved), lambda tensor: tensor):
                x = layer(x)
        kept.append(
            Kept(
                sum(parameter.nbytes for layer in layers for parameter in layer.parameters()),
                sum(tensor.nbytes for tensor in inputs),
                _bytes(saved, without=[*state, *inputs]),
            )
        )
    return kept


def _skip(layer: Any) -> Any:
    """Return what a layer of `benchmarks.models` stashes or pops."""
    return layer.skip_key("skip")


def _into(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:
    # The tensors are held: the address of a storage that has gone may be that of another one.
    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return save


def _bytes(tensors: Iterable[Tensor], without: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, but for those of others."""
    storages = {storage._cdata: storage for storage in map(Tensor.untyped_storage, tensors)}
    for other in without:
        storages.pop(other.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in storages.values())
