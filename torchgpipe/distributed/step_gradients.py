"""Add up gradients over replicas, once in a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from torchgpipe.gradients.replicas import add_gradients
from torchgpipe.gradients.set_aside import SetAside

__all__ = ["StepGradients"]


class StepGradients:
    """The gradients of one step, kept apart from those of earlier steps until the step has succeeded.

    Args:
        parameters: the parameters of this process
        group: the processes that hold the same parameters; None if there are no others
        device: where this process computes
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._group, self._device = group, device
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._earlier = SetAside(self._parameters)

    def begin(self) -> None:
        """Set the gradients of earlier steps aside."""
        self._earlier.begin()

    def end(self) -> None:
        """Add up the gradients of all replicas, and add them to those of earlier steps."""
        sums = [parameter.grad for parameter in self._parameters]
        if self._group is not None:
            sums = add_gradients(self._parameters, sums, self._group, self._device)
        self._earlier.end(sums)

    def undo(self) -> None:
        """Put the gradients of earlier steps back without those of this step, unless `end` has added all."""
        self._earlier.undo()
