"""Micro-batches that the caller gives: in a window of accumulation they are there already, and nothing is split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchgpipe.batch.sequence import CarriedCache, cut_sequence
from torchgpipe.model.settings import verify_number
from torchgpipe.model.values import each
from torchgpipe.replay.statistics import Norm

__all__ = ["GIVE_THEM", "MicroBatches", "order_of", "to_floats", "verify_independent", "windows"]

#: The next move where a batch cannot be split, for errors.
GIVE_THEM = "give the micro-batches yourself, pipelined(module, torchgpipe.MicroBatches([...]))"


# No Sequence: what moves and pins batches, such as a DataLoader, would make another of it without the weights.
class MicroBatches:
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
        order: the order in which a step runs the micro-batches of its input: as they come, or ``'longest'``: the
            longest in the middle, by the elements of the first tensor of each, and towards both ends shorter and
            shorter ones. Devices wait for each other where neighbours differ. Losses, values and random numbers are
            those of the order in which the micro-batches come; gradients are added in the order in which they run

    Raises:
        TypeError: ``batches`` is one batch, or holds ``MicroBatches``, or ``weights`` are no numbers.
        ValueError: there is no batch, the weights do not fit, or there is no such order.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        weights: Iterable[float | Tensor] | None = None,
        order: Literal["longest"] | None = None,
    ) -> None:
        if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
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
        try:
            self.weights = None if weights is None else to_floats(list(weights))
        except (TypeError, ValueError):
            raise TypeError(f"weights must be a list of numbers, one for each batch, but got {weights!r}") from None
        if self.weights is not None:
            if len(self.weights) != len(self.batches):
                raise ValueError(f"MicroBatches has {len(self.batches)} batches, but {len(self.weights)} weights")
            if not all([0 <= weight < math.inf for weight in self.weights]) or not sum(self.weights):
                raise ValueError(f"weights must be 0 or more, and not all 0, but are {self.weights}")
        if order not in ("longest", None):
            raise ValueError(f"order must be 'longest', or None for micro-batches as they come, but got {order!r}")
        self.order = order

    @classmethod
    def of_sequence(cls, batch: Mapping[str, Any], chunks: int | Sequence[int], cache: Any) -> MicroBatches:
        """Cut causal sequences along their length into chunks, which hand on their keys and values in a cache.

        So one long sequence keeps all devices busy. It is for ``step`` and calls of a model of transformers that
        :func:`pipelined` has made of an ordinary sample, and whose loss compares with the next labels; these are
        shifted across the borders.

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
        parts, carried = cut_sequence(batch, chunks, cache)
        window = cls(parts)
        window.carried = carried
        return window

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __repr__(self) -> str:
        return f"MicroBatches of {len(self)} batches"


def verify_independent(window: MicroBatches | None, where: str) -> None:
    """Raise an error if micro-batches are chunks of one sequence, and ``where`` takes no such.

    Raises:
        TypeError: they are.
    """
    if window is not None and window.carried is not None:
        raise TypeError(
            f"{where} cannot take MicroBatches.of_sequence, whose chunks depend on each other; give them to a call or "
            "a step of a model that torchgpipe.pipelined has made of an ordinary sample"
        )


class windows:
    """Group batches into windows of accumulation, each the micro-batches of one step. ::

        model = GPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), balance=[1, 1], loss_fn=nn.functional.mse_loss)
        loader = [(torch.randn(rows, 8), torch.randn(rows, 2)) for rows in (1, 3, 2)]
        for window in windows(loader, 2):
            inputs, targets = zip(*window)
            loss = model.step(MicroBatches(inputs), target=MicroBatches(targets))

    It yields :class:`MicroBatches`, has a length if the loader has one, and may be run through as often as the loader.

    Args:
        batches: a loader, or any iterable
        size: the number of batches in a window; the last one may have fewer

    Raises:
        TypeError: ``size`` is no integer.
        ValueError: ``size`` is less than 1.
    """

    def __init__(self, batches: Iterable[Any], size: int) -> None:
        self._batches, self._size = batches, verify_number("size", size, positive=True)

    def __iter__(self) -> Iterator[MicroBatches]:
        batches = iter(self._batches)
        while window := [*islice(batches, self._size)]:
            yield MicroBatches(window)

    def __len__(self) -> int:
        return math.ceil(len(self._batches) / self._size)  # type: ignore[arg-type]


def order_of(window: MicroBatches | None, model: nn.Module | None = None) -> list[int] | None:
    """Return the numbers of micro-batches in the order in which a step runs them; None if they run as they come.

    Raises:
        ValueError: a norm of ``model`` keeps running statistics, which would be those of another order.
    """
    if window is None or window.order is None:
        return None
    for name, norm in model.named_modules() if model is not None else ():
        # A deferred norm, which has `chunks`, merges the micro-batches.
        if isinstance(norm, Norm) and norm.training and norm.track_running_stats and not hasattr(norm, "chunks"):
            raise ValueError(
                f"order='longest' would change the running statistics of '{name}' ({type(norm).__name__}), which "
                "follow the order in which micro-batches run; leave order= out, freeze the norm (norm.eval()), or for "
                "GPipe give deferred_batch_norm=True"
            )
    # The time of a micro-batch is taken to grow with the elements of its first tensor.
    lengths = [next((tensor.numel() for _, tensor in each((batch,), objects=True)), 0) for batch in window]
    shortest_first = sorted(range(len(window)), key=lengths.__getitem__)
    return shortest_first[::2] + shortest_first[1::2][::-1]


def to_floats(values: Sequence[float | int | Tensor]) -> list[float]:
    """Return numbers as floats. For tensors on an accelerator, the host waits once."""
    tensors = [value.detach() for value in values if isinstance(value, Tensor) and value.numel() == 1]
    if len(tensors) == len(values) and len({tensor.device for tensor in tensors}) == 1:
        return [float(number) for number in torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()]
    return [float(value) for value in values]
