"""Find the shapes at all boundaries of a model without data, and without sending anything.

Every process runs the whole model on fake tensors, which have shapes, dtypes and devices only. Given the shapes of the
input, the run tells the structure, the shapes and what requires grad at the end of each partition. The meta device
would not do, because autocast acts by the type of the device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import fake_tensor_mode
from torchgpipe.distributed.boundary import on_meta
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import layers_of, split
from torchgpipe.replay.statistics import Norm
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["FakeModel"]


class FakeModel:
    """A copy of a model without data, which finds the shapes at its boundaries.

    Args:
        module: the model; it is not changed
        balance: the number of layers in each partition
        device: where this process computes, which decides what autocast does

    Attributes:
        partitions: the layers of the copy, by stage
    """

    def __init__(self, module: nn.Sequential, balance: Sequence[int], device: torch.device) -> None:
        self._mode = fake_tensor_mode()
        self._device = device
        memo = {id(tensor): self._fake(tensor) for tensor in _tensors(module)}
        self._module = copy.deepcopy(module, memo)
        for layer in self._module.modules():
            if isinstance(layer, Norm):
                layer.momentum = 0.0  # Momentum None reads the value of the counter, and a fake counter has none.
        self.partitions = split(layers_of(self._module), balance)

    def _fake(self, tensor: Tensor) -> Tensor:
        # The mode keeps a weak reference to each tensor that it sees, and `swap_tensors`, with which `place` makes a
        # parameter of a meta tensor, refuses tensors with weak references. So the mode sees an alias.
        shown = tensor.detach()
        with self._mode:
            fake = torch.empty_like(shown, device=self._device)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def follow(self, owner: nn.Module) -> None:
        """Adopt the mode of ``owner``, and freeze the parameters that are frozen there."""
        self._module.train(owner.training)
        fakes = dict(self._module.named_parameters())
        for name, parameter in owner.named_parameters():
            if name in fakes:
                fakes[name].requires_grad_(parameter.requires_grad)

    def forms(self, batch: Batch) -> list[Batch]:
        """Return the form at each boundary for one micro-batch: of the input, and of the output of each partition.

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
                    error.add_note(f"on tensors without data, to find the shapes at the end of partition {j}")
                    raise
                output.skips = dict(tracker.skips)
                forms.append(output)
        return list(map(on_meta, forms))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for layer in module.modules():
        values = [*layer._parameters.values(), *layer._buffers.values(), *vars(layer).values()]
        yield from [tensor for tensor in values if isinstance(tensor, Tensor)]
