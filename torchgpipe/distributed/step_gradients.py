"""Add up gradients over replicas, once in a step, and clip gradients over all stages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import add_each, versions
from torchgpipe.gradients.replicas import add_gradients
from torchgpipe.gradients.sums import sum_of

__all__ = ["StepGradients", "clip_grad_norm"]


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
        self._before = [parameter.grad for parameter in self._parameters]
        self._versions = versions(self._before)

    def begin(self) -> None:
        """Set the gradients of earlier steps aside."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def end(self) -> None:
        """Add up the gradients of all replicas, and add them to those of earlier steps."""
        sums = [parameter.grad for parameter in self._parameters]
        if self._group is not None:
            sums = add_gradients(self._parameters, sums, self._group, self._device)
        befores, totals = list[Tensor](), list[Tensor]()
        for parameter, before, total in zip(self._parameters, self._before, sums):
            if before is not None and total is not None and before.layout is torch.strided:
                parameter.grad = before
                befores.append(before)
                totals.append(total)
            else:
                parameter.grad = sum_of(before, total)
        if befores:
            add_each(befores, totals)  # One call: Ctrl-C comes before all of it, or behind.

    def undo(self) -> None:
        """Put the gradients of earlier steps back without those of this step, unless `end` has added all."""
        if versions(self._before) == self._versions:
            for parameter, before in zip(self._parameters, self._before):
                parameter.grad = before


def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Scale the gradients in all processes of ``group`` so that their common norm is at most ``max_norm``."""
    mine = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in mine if p.grad is not None], norm_type).to(device, torch.float64)
    if norm_type == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group)
    else:
        norm.pow_(norm_type)
        dist.all_reduce(norm, group=group)
        norm.pow_(1 / norm_type)
    nn.utils.clip_grads_with_norm_(mine, max_norm, norm)
    return norm
