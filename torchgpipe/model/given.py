"""Micro-batches that the caller gives: in a window of accumulation they are there already, and nothing is split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["CarriedCache", "MicroBatches", "to_floats"]

#: What has a token of the sequence in each place of dimension 1, as transformers names it.
_OF_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "labels")

#: The layers of caches that make new tensors of the old ones, so that autograd can follow. Others write in place, or
#: round.
_GROWING = {"DynamicLayer", "DynamicSlidingWindowLayer"}

#: The label that transformers leaves out of a loss.
_IGNORED = -100


class CarriedCache(NamedTuple):
    """The keys and values that the chunks of one sequence hand on.

    Attributes:
        cache: an empty cache
        ends: for each chunk, the number of tokens up to its end
    """

    cache: Any
    ends: Sequence[int]


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
        self.carried: CarriedCache | None = None
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

    @classmethod
    def of_sequence(cls, batch: Mapping[str, Any], chunks: int | Sequence[int], cache: Any) -> MicroBatches:
        """Cut causal sequences along their length into chunks, which hand on their keys and values in a cache. ::

            window = MicroBatches.of_sequence({"input_ids": ids, "labels": ids}, 8, DynamicCache(config=model.config))
            loss = model.step(window)

        So one sequence keeps several devices busy. It is for a model of transformers that :func:`pipelined` has made of
        an ordinary sample, and whose loss compares with the next labels. Labels are shifted across the borders.

        Args:
            batch: the arguments of the model: ``input_ids`` or ``inputs_embeds``, ``labels``, and what else has a token
                in each place of dimension 1, or is an ``attention_mask`` of two dimensions
            chunks: the number of chunks, of nearly the same length, or the length of each. As attention looks back,
                later chunks take longer, so let the first ones be longer
            cache: an empty ``DynamicCache(config=model.config)``

        Raises:
            TypeError: the cache cannot be differentiated, or a tensor has no known place in the sequence.
            ValueError: the lengths do not fit.
        """
        layers = getattr(cache, "layers", None) or [None]
        kinds = {type(layer).__name__ for layer in layers}
        if not kinds <= _GROWING or getattr(cache, "offloading", False):
            raise TypeError(
                "of_sequence takes a cache that can be differentiated, DynamicCache(config=model.config) with layers of "
                f"{sorted(_GROWING)}, but got {type(cache).__name__} with {sorted(kinds)}"
            )
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        unknown = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in _OF_TOKENS}
        mask = unknown.pop("attention_mask", ())
        sizes = {tensor.size(1) if tensor.dim() > 1 else 0 for name, tensor in tensors.items() if name not in unknown}
        if unknown or len(mask) not in (0, 2) or len(sizes) != 1:
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            raise TypeError(
                f"of_sequence cuts {', '.join(_OF_TOKENS)} and an attention_mask of two dimensions along dimension 1, "
                f"which must have one size, but got {shapes}"
            )
        (length,) = sizes
        if isinstance(chunks, int):
            chunks = [length // chunks + (k < length % chunks) for k in range(chunks)] if chunks > 0 else []
        ends = [*accumulate(chunks)]
        if not ends or min(chunks) < 1 or ends[-1] != length:
            raise ValueError(f"the chunks have the lengths {[*chunks]}, but the sequence has {length} tokens")
        whole = {**batch, "past_key_values": cache, "use_cache": False}
        if "labels" in tensors:
            following = pad(tensors["labels"], (0, 1), value=_IGNORED)[:, 1:]
            # A model that does not look at these has no labels at all: its loss is not a number, or 0, and not wrong.
            whole["labels"] = tensors["labels"] = torch.full_like(following, _IGNORED)
            tensors["shift_labels"] = following
            whole.setdefault("num_items_in_batch", int((following != _IGNORED).sum()))
        parts = []
        for begin, end in zip([0, *ends], ends):
            cut = {name: tensor[:, 0 if name == "attention_mask" else begin : end] for name, tensor in tensors.items()}
            parts.append({**whole, **{name: tensor.contiguous() for name, tensor in cut.items()}})
        window = cls(parts)
        window.carried = CarriedCache(cache, ends)
        return window

    def verify_apart(self, where: str) -> None:
        """Raise an error if the batches are chunks of one sequence, and ``where`` takes no such.

        Raises:
            TypeError: they are.
        """
        if self.carried is not None:
            raise TypeError(
                f"{where} cannot take MicroBatches.of_sequence, whose chunks depend on each other: give the sample as "
                "an ordinary batch, and chunks to the call or the step of a model that torchgpipe.pipelined has made"
            )

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
