"""Find the forms of all that crosses from partition to partition, without data and without sending anything.

Every process runs the whole model on fake tensors, which have shapes, dtypes and devices only. So both ends of each
message know its form, and layers that an input does not fit raise in all processes, before anything is sent. Stand-ins
would not do: they are no fake tensors to PyTorch's operations that look at values on their way, such as `one_hot`. The
meta device would not do, because autocast acts by the type of the device.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import fake_tensor_mode
from torchgpipe.devices.typing import Leaf
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import layers_of, split
from torchgpipe.processes.stand_in import form_of
from torchgpipe.replay.statistics import Norm
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["Forms", "FormsOfStep"]

#: The number of mini-batches of different shapes whose forms are kept.
_MOST = 64


class FormsOfStep(NamedTuple):
    """The forms of a mini-batch.

    Attributes:
        batches: for each micro-batch, its input and the outputs of all partitions, of fake tensors; the skips of each
            are all that were stashed before
        checksum: a number that is equal where all forms are
    """

    batches: Sequence[Sequence[Batch]]
    checksum: int


class Forms:
    """A copy of a model without data.

    Args:
        module: the model; it is not changed
        balance: the number of layers in each partition
        device: where this process computes, which decides what autocast does
    """

    def __init__(self, module: nn.Sequential, balance: Sequence[int], device: torch.device) -> None:
        self._mode = fake_tensor_mode()
        self._device = device
        memo = {id(tensor): self._fake(tensor) for tensor in _tensors(module)}
        self._module = copy.deepcopy(module, memo)
        for layer in self._module.modules():
            if isinstance(layer, Norm):
                layer.momentum = 0.0  # Momentum None reads the value of the counter, and a fake counter has none.
        self._partitions = split(layers_of(self._module), balance)
        self._known: dict[Any, FormsOfStep] = {}

    def _fake(self, tensor: Tensor) -> Tensor:
        # The mode keeps a weak reference to each tensor that it sees, and `swap_tensors`, with which `place` makes a
        # parameter of a meta tensor, refuses tensors with weak references. So the mode sees an alias.
        shown = tensor.detach()
        with self._mode:
            fake = torch.empty_like(shown, device=self._device)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def of(self, inputs: Sequence[Batch], owner: nn.Module) -> FormsOfStep:
        """Return the forms of a mini-batch.

        Args:
            inputs: its micro-batches
            owner: the layers of this process, in the mode of the step

        Raises:
            Exception: what a layer raises on tensors without data, with a note.
        """
        kind = self._device.type
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        frozen = tuple([not parameter.requires_grad for parameter in owner.parameters()])
        each = [_described(batch) for batch in inputs]
        key = *each, torch.is_grad_enabled(), owner.training, cast, frozen
        if key not in self._known:
            self._follow(owner)
            found = {text: self._found(batch) for text, batch in zip(each, inputs)}
            batches = [found[text] for text in each]
            words = str([cast, owner.training, torch.is_grad_enabled(), [list(map(_described, of)) for of in batches]])
            if len(self._known) == _MOST:
                self._known.clear()
            self._known[key] = FormsOfStep(batches, zlib.crc32(words.encode()))
        return self._known[key]

    def _follow(self, owner: nn.Module) -> None:
        """Adopt the mode of ``owner``, and freeze the parameters that are frozen there."""
        self._module.train(owner.training)
        fakes = dict(self._module.named_parameters())
        for name, parameter in owner.named_parameters():
            if name in fakes:
                fakes[name].requires_grad_(parameter.requires_grad)

    def _found(self, batch: Batch) -> list[Batch]:
        tracker, stashed = SkipTracker(), dict[Any, Leaf]()
        with self._mode, tracker, torch.random.fork_rng(devices=[]):
            batch = batch.replace(tuple([None if leaf is None else self._bare(leaf) for leaf in batch.leaves]))
            found, value = [_without_graph(batch, {})], batch.value
            for j, partition in enumerate(self._partitions):
                partition.follow(layers_of(self._module), self._module.training)
                try:
                    value = partition(value)
                    output = Batch.of(value, f"the output of partition {j}")
                except Exception as error:
                    error.add_note(f"on tensors without data, to find the shapes at the end of partition {j}")
                    raise
                stashed |= tracker.skips
                found.append(_without_graph(output, stashed))
        return found

    def _bare(self, leaf: Tensor) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device, requires_grad=leaf.requires_grad)


def _without_graph(batch: Batch, skips: dict[Any, Leaf]) -> Batch:
    """Return a batch of new tensors, whose elements fill their memory without gaps."""

    def bare(leaf: Leaf) -> Leaf:
        return None if leaf is None else leaf.detach().clone().requires_grad_(leaf.requires_grad)

    form = batch.replace(tuple(map(bare, batch.leaves)))
    form.skips = {key: bare(skip) for key, skip in skips.items()}
    return form


def _described(batch: Batch) -> str:
    """Return what tells a form from others, but for the device: each process has another."""
    leaves = [*batch.leaves, *(batch.skips or {}).values()]
    return f"{batch.spec} {[x if x is None else (*form_of(x)[:3], x.requires_grad) for x in leaves]}"


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for layer in module.modules():
        values = [*layer._parameters.values(), *layer._buffers.values(), *vars(layer).values()]
        yield from [tensor for tensor in values if isinstance(tensor, Tensor)]
