"""What crosses from one stage to the next, and how it gets into tensors that PyTorch's stages can send.

PyTorch's pipelining receives every micro-batch of a boundary in buffers of the same shapes, which it has to know
beforehand, and sends tensors only. Ours are nested values, with skips that go further, and the last micro-batch may
be smaller. So each tensor is sent flat, and filled up to the size that it has in the largest micro-batch:

    leaves of the output ──┐                                        ┌──► leaves of the input
                           ├──► flat ──► filled up ══► cut ──► shape ┤
    skips in flight ───────┘                                        └──► skips in flight

The shapes, the structure and what requires grad are found out on fake tensors, which have no data: every process
runs the whole model on them, and nothing has to be sent for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.function import Function
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import layers_of, split
from torchgpipe.replay.statistics import Norm
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["Boundary", "Shapes", "leaves_of", "on_meta"]


def leaves_of(form: Batch) -> Leaves:
    """The leaves of a value and the skips that go along with it."""
    return (*form.leaves, *(form.skips or {}).values())


def on_meta(batch: Batch) -> Batch:
    """The form of a value: tensors without data."""

    def bare(leaf: Leaf) -> Leaf:
        if leaf is None:
            return None
        meta = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
        return meta.requires_grad_(leaf.requires_grad)

    form = batch.replace(tuple(map(bare, batch.leaves)))
    form.skips = {key: bare(skip) for key, skip in (batch.skips or {}).items()}
    return form


class Boundary:
    """The way from one stage to the next, or from the last one out.

    Args:
        forms: the value of each micro-batch, on the meta device
        where: names the boundary, for errors

    Raises:
        ValueError: a micro-batch has another structure than the first.

    Attributes:
        forms: the same
        buffers: what is sent for each micro-batch, on the meta device
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
                "return the same for each"
            )
        columns = [column for column in zip(*map(leaves_of, forms)) if column[0] is not None]
        self.buffers = tuple([max(column, key=Tensor.numel).flatten().detach() for column in columns])
        for buffer, column in zip(self.buffers, columns):
            buffer.requires_grad_(any([leaf.requires_grad for leaf in column]))

    def pack(self, i: int, batch: Batch) -> tuple[Tensor, ...]:
        """What to send for micro-batch ``i``.

        Raises:
            RuntimeError: it is not what the fake tensors have foretold.
        """
        form = self.forms[i]
        skips = batch.skips or {}
        leaves = (*batch.leaves, *[skips[key] for key in form.skips or {}])
        expected = leaves_of(form)
        if len(leaves) != len(expected) or any([not _fits(*pair) for pair in zip(leaves, expected)]):
            raise RuntimeError(
                f"{self._where} is {_describe(leaves)} for micro-batch {i}, but {_describe(expected)} was foreseen "
                "from the shapes of the input; what a stage returns must depend on these shapes alone"
            )
        present = [leaf for leaf in leaves if leaf is not None]
        # Of what a checkpointed cell returns, everything seems to require grad.
        needed = [leaf if buffer.requires_grad else leaf.detach() for leaf, buffer in zip(present, self.buffers)]
        return tuple([Flat.apply(leaf, buffer.numel()) for leaf, buffer in zip(needed, self.buffers)])

    def unpack(self, i: int, wires: Sequence[Tensor]) -> Batch:
        """What has arrived for micro-batch ``i``."""
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
    """Makes a tensor flat, and fills it up to ``size``. The result is no view, which PyTorch could not detach."""

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


class Shapes:
    """A model without data, to find out what crosses its boundaries.

    Args:
        module: the model, which is not changed
        balance: the number of layers in each partition
        device: where the stage of this process computes, which decides what autocast does

    Attributes:
        partitions: its layers, by stage
    """

    def __init__(self, module: nn.Sequential, balance: Sequence[int], device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        memo = {id(tensor): self._fake(tensor) for tensor in _tensors(module)}
        self._module = copy.deepcopy(module, memo)
        for layer in self._module.modules():
            if isinstance(layer, Norm):
                layer.momentum = 0.0  # A plain average would ask the fake counter for its value.
        self.partitions = split(layers_of(self._module), balance)

    def _fake(self, tensor: Tensor) -> Tensor:
        # Of what it is shown the mode keeps a weak reference, with which no parameter could come into being.
        shown = tensor.detach()
        with self._mode:
            fake = torch.empty_like(shown, device=self._device)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def follow(self, owner: nn.Module) -> None:
        """Takes over the mode of the model, and which of the parameters that ``owner`` has are frozen."""
        self._module.train(owner.training)
        fakes = dict(self._module.named_parameters())
        for name, parameter in owner.named_parameters():
            if name in fakes:
                fakes[name].requires_grad_(parameter.requires_grad)

    def forms(self, batch: Batch) -> list[Batch]:
        """The value at each boundary for a micro-batch: the input, between each two partitions, and the output.

        Raises:
            Exception: what a layer raises, with a note.
        """
        tracker = SkipTracker()
        forms = [batch]
        with self._mode, tracker, torch.random.fork_rng(devices=[]):
            leaves = [None if leaf is None else torch.empty_like(leaf, device=self._device) for leaf in batch.leaves]
            value = batch.replace(tuple(leaves)).value
            for j, partition in enumerate(self.partitions):
                partition.follow(layers_of(self._module), self._module.training)
                try:
                    value = partition(value)
                    output = Batch.of(value, f"the output of partition {j}")
                except Exception as error:
                    error.add_note(f"on tensors without data, to find out the shapes at the end of partition {j}")
                    raise
                output.skips = dict(tracker.skips)
                forms.append(output)
        return list(map(on_meta, forms))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for layer in module.modules():
        own = [*layer._parameters.values(), *layer._buffers.values(), *vars(layer).values()]
        yield from [tensor for tensor in own if isinstance(tensor, Tensor)]
