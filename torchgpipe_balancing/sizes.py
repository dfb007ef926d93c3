"""Count the bytes that a layer holds: what it keeps for backward, and what it owns and hands on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe_balancing.walk import Input, Output, gradients_of, run, tensors_in

__all__ = ["SizeCounter", "Sizes", "footprints"]


@dataclass(frozen=True)
class Sizes:
    """What a layer holds, in bytes.

    Attributes:
        activations: what autograd saves for backward, without what an earlier layer already keeps
        parameters: its parameters
        buffers: its buffers
        output: the output to the next layer, and the skips to later layers
    """

    activations: int
    parameters: int
    buffers: int
    output: int


def footprints(sizes: Iterable[Sizes], *, chunks: int = 1, param_scale: float = 2.0) -> list[float]:
    """Return the bytes that each layer takes in training: activations / chunks + parameters x param_scale.

    Args:
        sizes: what each layer holds

    Keyword Args:
        chunks: the number of micro-batches that the sample will be split into; one of them is counted
        param_scale: how many times parameters are held, gradients and the optimizer's state included

    Raises:
        ValueError: `chunks` is below 1, or `param_scale` negative.

    """
    if chunks < 1:
        raise ValueError(f"chunks must be 1 or more, not {chunks}")
    if not param_scale >= 0:
        raise ValueError(f"param_scale must be 0 or more, not {param_scale}")
    return [size.activations / chunks + size.parameters * param_scale for size in sizes]


class SizeCounter:
    """Count what a layer keeps for backward, and what it owns.

    Two layers often keep the same storage: the one as its output, the next as its input. It counts for the first.
    """

    def __init__(self) -> None:
        self._counted: set[int] = set()

    def __call__(self, layer: nn.Module, input: Input) -> tuple[Output, Sizes]:
        # Weak, because a tensor that autograd drops before the layer returns is not kept.
        saved: WeakSet[_Saved] = WeakSet()

        def pack(tensor: Tensor) -> _Saved:
            packed = _Saved(tensor)
            saved.add(packed)
            return packed

        with saved_tensors_hooks(pack, lambda packed: packed.tensor):
            output = run(layer, input)

        kept = _storages(packed.tensor for packed in saved)
        owned = _storages(chain(layer.parameters(), layer.buffers()))
        new = kept.keys() - owned.keys() - self._counted
        # Without skips: they move to the host, and a later tensor can get their address.
        self._counted = (self._counted | new) & _storages(tensors_in(output.value)).keys()

        sizes = Sizes(
            activations=sum(kept[address] for address in new),
            parameters=_bytes(layer.parameters()),
            buffers=_bytes(layer.buffers()),
            output=_bytes(tensors_in(output)),
        )
        torch.autograd.backward(*gradients_of(output))
        return output, sizes


class _Saved:
    """A tensor that autograd saved, in a class that can be referred to weakly."""

    def __init__(self, tensor: Tensor) -> None:
        # Detached, because an operation that saves its output would otherwise hold itself.
        self.tensor = tensor.detach()


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return address and bytes of each storage behind the tensors. Sparse tensors have no storage, and do not count."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
