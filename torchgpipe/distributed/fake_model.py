"""What crosses each boundary of a model, found out without data and without sending anything.

Every process runs the whole model on fake tensors, which have shapes, dtypes and devices only. From the shapes of the
input follow the structure, the shapes and what requires grad at the end of each partition.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchgpipe.distributed.boundary import on_meta
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import layers_of, split
from torchgpipe.replay.statistics import Norm
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["FakeModel"]


class FakeModel:
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
