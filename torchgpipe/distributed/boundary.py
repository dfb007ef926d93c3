"""Pack what crosses from one stage to the next into tensors that PyTorch's stages can send.

PyTorch's pipelining sends tensors only. It receives every micro-batch of a boundary in the same buffers, whose shapes
it must know beforehand. A boundary of ours has nested values, and skips for later stages, and its last micro-batch may
be smaller. So each tensor is sent flat, padded to the size that it has in the largest micro-batch:

    leaves of the output ──┐                                     ┌──► leaves of the input
                           ├──► flatten ──► pad ══► cut ──► view ┤
    skips in flight ───────┘                                     └──► skips in flight
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.graph.function import Function
from torchgpipe.model.microbatch import Batch

__all__ = ["Boundary", "leaves_of", "on_meta"]


def leaves_of(form: Batch) -> Leaves:
    """Return the leaves of a value, followed by the skips in flight."""
    return (*form.leaves, *(form.skips or {}).values())


def on_meta(batch: Batch) -> Batch:
    """Return the form of a value: the same structure, with tensors without data."""

    def bare(leaf: Leaf) -> Leaf:
        if leaf is None:
            return None
        meta = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
        return meta.requires_grad_(leaf.requires_grad)

    form = batch.replace(tuple(map(bare, batch.leaves)))
    form.skips = {key: bare(skip) for key, skip in (batch.skips or {}).items()}
    return form


class Boundary:
    """The end of a stage, where values are sent to the next stage or leave the pipeline.

    Args:
        forms: the value of each micro-batch, on the meta device
        where: the name of the boundary, for errors

    Raises:
        ValueError: a micro-batch has another structure than the first.

    Attributes:
        forms: the value of each micro-batch, on the meta device
        buffers: the tensors that are sent for each micro-batch, on the meta device
    """

    def __init__(self, forms: Sequence[Batch], where: str) -> None:
        self.forms = forms
        self._where = where
        kinds = {
            (str(form.spec), tuple([leaf if leaf is None else leaf.dtype for leaf in leaves_of(form)]))
            for form in forms
        }
        if len(kinds) > 1:
            raise ValueError(
                f"{where} has another structure for some micro-batches than for others: {sorted(map(str, kinds))}; "
                "return the same structure for each micro-batch"
            )
        columns = [column for column in zip(*map(leaves_of, forms)) if column[0] is not None]
        self.buffers = tuple([max(column, key=Tensor.numel).flatten().detach() for column in columns])
        for buffer, column in zip(self.buffers, columns):
            buffer.requires_grad_(any([leaf.requires_grad for leaf in column]))

    def pack(self, i: int, batch: Batch) -> tuple[Tensor, ...]:
        """Return the tensors to send for micro-batch ``i``.

        Raises:
            RuntimeError: the shapes or dtypes differ from those that the fake model had.
        """
        form = self.forms[i]
        skips = batch.skips or {}
        leaves = (*batch.leaves, *[skips[key] for key in form.skips or {}])
        expected = leaves_of(form)
        if len(leaves) != len(expected) or any([not _fits(*pair) for pair in zip(leaves, expected)]):
            raise RuntimeError(
                f"{self._where} is {_describe(leaves)} for micro-batch {i}, but {_describe(expected)} was expected "
                "from the shapes of the input; let the shapes that a stage returns depend on these shapes alone"
            )
        present = [leaf for leaf in leaves if leaf is not None]
        # All outputs of a checkpointed cell require grad, also those that the next stage expects without.
        needed = [leaf if buffer.requires_grad else leaf.detach() for leaf, buffer in zip(present, self.buffers)]
        return tuple([Flat.apply(leaf, buffer.numel()) for leaf, buffer in zip(needed, self.buffers)])

    def unpack(self, i: int, wires: Sequence[Tensor]) -> Batch:
        """Return the value of micro-batch ``i``, given the tensors that have arrived for it."""
        form = self.forms[i]
        arrived = iter(wires)
        leaves = tuple([None if leaf is None else _cut(next(arrived), leaf) for leaf in leaves_of(form)])
        batch = form.replace(leaves[: len(form.leaves)])
        batch.skips = dict(zip(form.skips or {}, leaves[len(form.leaves) :]))
        return batch


def _fits(leaf: Leaf, form: Leaf) -> bool:
    if leaf is None or form is None:
        return leaf is form
    return leaf.shape == form.shape and leaf.dtype == form.dtype


class Flat(Function):
    """Flatten a tensor and pad it to ``size``. The result is no view, because PyTorch detaches it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, size: int) -> Tensor:
        ctx.shape = leaf.shape
        flat = leaf.detach().reshape(-1)
        return F.pad(flat, (0, size - len(flat))) if len(flat) < size else flat.contiguous().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[: ctx.shape.numel()].view(ctx.shape), None


def _cut(flat: Tensor, form: Tensor) -> Tensor:
    return flat[: form.numel()].view(form.shape)


def _describe(leaves: Leaves) -> str:
    return str([leaf if leaf is None else (str(leaf.dtype).removeprefix("torch."), *leaf.shape) for leaf in leaves])
