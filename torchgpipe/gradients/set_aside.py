"""The gradients of earlier steps, set aside while a step runs: at its end they all get its sums, or none does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import add_each, versions
from torchgpipe.devices.typing import Leaf
from torchgpipe.gradients.sums import sum_of

__all__ = ["SetAside"]


class SetAside:
    """What was in the ``.grad`` of parameters before a step.

    Args:
        parameters: the parameters; nothing else may change their gradients in place until `end`

    Attributes:
        parameters: see above
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._before: list[Leaf] = [parameter.grad for parameter in parameters]
        self._versions = versions(self._before)

    def begin(self) -> None:
        """Leave no gradient."""
        for parameter, before in zip(self.parameters, self._before):
            if before is not None:
                parameter.grad = None

    @torch.no_grad()
    def end(self, sums: Sequence[Leaf]) -> None:
        """Add the gradients of the step, one for each parameter, to what was set aside."""
        befores, totals = list[Tensor](), list[Tensor]()
        for parameter, before, total in zip(self.parameters, self._before, sums):
            if before is not None and total is not None and before.layout is torch.strided:
                parameter.grad = before
                befores.append(before)
                totals.append(total)
            else:
                parameter.grad = sum_of(before, total)
        if befores:
            add_each(befores, totals)  # One call: Ctrl-C comes before all of it, or behind.

    @property
    def has_ended(self) -> bool:
        """Whether `end` has added the gradients of the step to those from before, as far as there are any."""
        return versions(self._before) != self._versions

    def undo(self) -> None:
        """Put everything back that was there at the beginning, unless `end` has added to it."""
        if not self.has_ended:
            for parameter, before in zip(self.parameters, self._before):
                parameter.grad = before
