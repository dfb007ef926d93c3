"""The gradients of parameters in a step, where the pipeline itself runs backward.

No backward pass of the caller is around a step. So each cell adds to ``.grad``, one gradient at a time, and there is
nothing to hand over, unless something listens: a hook of a parameter must hear the gradient of the mini-batch, once.
Then the gradients of the cells are summed beside ``.grad``, and go through the hooks at the end of the step. So are the
gradients of parameters that several partitions share, or the last bit would depend on the schedule.

Gradients that are there when a step begins are set aside and added at its end. A step that fails puts them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.typing import Leaf
from torchgpipe.engine.function import Edge, accumulate
from torchgpipe.engine.gradients import differentiate_into, sum_of
from torchgpipe.engine.hooks import has_hooks
from torchgpipe.engine.replicas import Replicas

__all__ = ["DirectGradients", "deliver", "reduce"]


class DirectGradients:
    """The gradients of the parameters of a partition during a step.

    Args:
        parameters: the parameters; each requires grad
        frozen: the parameters that do not
        shared: whether another partition has one of the parameters, too
    """

    def __init__(self, parameters: Sequence[Tensor], frozen: Sequence[Tensor], *, shared: bool) -> None:
        self._parameters = parameters
        self._owned = (*parameters, *frozen)
        self._sums: list[Leaf] | None = None
        self._before: list[Leaf] = [parameter.grad for parameter in parameters]
        #: Gradients that a sum is added to in place, each with a copy.
        self._copies: list[tuple[Tensor, Tensor]] = []
        if shared or any([_listens(parameter) for parameter in parameters]):
            self._sums = [None] * len(parameters)
            return
        for parameter in parameters:
            parameter.grad = None

    def differentiate(
        self, roots: Sequence[Edge], grads: Sequence[Tensor], leaves: Sequence[Tensor], *, keep_graph: bool
    ) -> list[Leaf]:
        """Differentiate the graph of a cell; see :meth:`ParameterGradients.differentiate`."""
        return differentiate_into(self._sums, self._owned, roots, grads, leaves, keep_graph=keep_graph)

    @property
    def adds_to_grad(self) -> bool:
        """Whether each cell adds to ``.grad``."""
        return self._sums is None

    def take(self, totals: dict[Tensor, Leaf]) -> None:
        """Move the gradients of this step to ``totals``, and add those of parameters that are there already."""
        for k, parameter in enumerate(self._parameters):
            grad = parameter.grad if self._sums is None else self._sums[k]
            totals[parameter] = sum_of(totals.get(parameter), grad)
        self.put({})

    def put(self, totals: dict[Tensor, Leaf]) -> None:
        """Move gradients from ``totals`` to the parameters, each to the first partition that has the parameter."""
        for k, parameter in enumerate(self._parameters):
            total = totals.pop(parameter, None)
            if self._sums is not None:
                self._sums[k] = total
            else:
                parameter.grad = total

    def sums(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters whose gradients are to be delivered, with the sums."""
        pairs = [(one, total) for one, total in zip(self._parameters, self._sums or ()) if total is not None]
        for before, total in zip(self._before, self._sums or ()):
            if before is not None and total is not None:
                # A hook may fail after the gradient of another parameter has been added.
                self._copies.append((before, before.detach().clone()))
        return pairs

    @torch.no_grad()
    def commit(self) -> None:
        """Add the gradients that were set aside."""
        if self._sums is not None:
            return
        for parameter, before in zip(self._parameters, self._before):
            if before is not None:
                if parameter.grad is not None and before.layout is torch.strided:
                    parameter.grad = before.add_(parameter.grad)
                else:
                    parameter.grad = sum_of(before, parameter.grad)

    def restore(self) -> None:
        """Put the gradients back that were there when the step began."""
        for parameter, before in zip(self._parameters, self._before):
            parameter.grad = before
        for before, copied in self._copies:
            before.detach().copy_(copied)


def reduce(parts: Sequence[DirectGradients], replicas: Replicas) -> None:
    """Add the gradients of all replicas, all at once: views may be divided or joined in another way elsewhere."""
    if not replicas.exist:
        return
    grads: dict[Tensor, Leaf] = {}
    for part in parts:
        part.take(grads)
    parameters = list(grads)
    own = [grads.pop(parameter) for parameter in parameters]  # Alone holds them, so they are freed one by one.
    totals: dict[Tensor, Leaf] = dict(zip(parameters, replicas.add_gradients(parameters, own)))
    for part in parts:
        part.put(totals)


def deliver(sums: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Let sums arrive at their parameters as the gradients of a backward pass do, hooks included."""
    if sums:
        parameters, totals = zip(*sums)
        accumulate([get_gradient_edge(parameter) for parameter in parameters], totals, keep_graph=False)


def _listens(parameter: Tensor) -> bool:
    node: Any = get_gradient_edge(parameter).node
    return not parameter.is_leaf or has_hooks(parameter, node)
