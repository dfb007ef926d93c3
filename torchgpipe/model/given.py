"""Micro-batches that the caller gives: in a window of accumulation they are there already, and nothing is split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

__all__ = ["GIVE_THEM", "MicroBatches", "to_floats"]

#: The next move where a batch cannot be split, for errors.
GIVE_THEM = "give the micro-batches yourself, pipelined(module, torchgpipe.MicroBatches([...]))"


class MicroBatches(Sequence[Any]):
    """Mark a list of batches that are the micro-batches of one mini-batch, such as a window of accumulation. ::

        model = GPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), balance=[1, 1])
        outputs = model(MicroBatches([torch.randn(1, 8), torch.randn(3, 8)]))  # a list of two outputs
        sum(output.mean() for output in outputs).backward()

    The micro-batches may differ in shape, rows and structure. Nothing of them is split, padded, joined or compared, so
    ``chunks`` plays no part, and a call returns a list with an output for each.

    Args:
        batches: the micro-batches, each what the model takes. For :class:`GPipe` that is the value of an argument; all
            arguments are ``MicroBatches``, None, or in :class:`NoChunk`. For :func:`pipelined` it is a tensor, a tuple
            of positional arguments, a dict of keyword arguments, or (tuple, dict)
        weights: the weight of each in the loss of a step, which is their weighted mean (default: as for a mini-batch
            that was split: the labels that count, or the rows in dimension 0 of the first tensor)

    Raises:
        TypeError: ``batches`` is one batch, or holds ``MicroBatches``.
        ValueError: there is no batch, or the weights do not fit.
    """

    def __init__(self, batches: Iterable[Any], *, weights: Iterable[float | Tensor] | None = None) -> None:
        if isinstance(batches, (Tensor, Mapping, str)):
            raise TypeError(
                f"MicroBatches takes a list of batches, but got one {type(batches).__name__}; give "
                "MicroBatches([batch_1, batch_2, ...]), or let chunks= split the mini-batch"
            )
        self.batches = tuple(batches)
        if not self.batches:
            raise ValueError("MicroBatches needs one batch or more, but got none")
        if any([isinstance(batch, MicroBatches) for batch in self.batches]):
            raise TypeError("MicroBatches cannot be inside of MicroBatches; give one list of all batches")
        self.weights = None if weights is None else to_floats(list(weights))
        if self.weights is not None:
            if len(self.weights) != len(self.batches):
                raise ValueError(f"MicroBatches has {len(self.batches)} batches, but {len(self.weights)} weights")
            if not all([0 <= weight < math.inf for weight in self.weights]) or not sum(self.weights):
                raise ValueError(f"weights must be 0 or more, and not all 0, but are {self.weights}")

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __repr__(self) -> str:
        return f"MicroBatches of {len(self)} batches"


def to_floats(values: Sequence[float | int | Tensor]) -> list[float]:
    """Return numbers as floats. For tensors on an accelerator, the host waits once."""
    tensors = [value.detach() for value in values if isinstance(value, Tensor) and value.numel() == 1]
    if len(tensors) == len(values) and len({tensor.device for tensor in tensors}) == 1:
        return [float(number) for number in torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()]
    return [float(value) for value in values]
