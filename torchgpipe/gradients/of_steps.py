"""The way of the gradients of a step from aliases into ``.grad``: either all of them arrive, or none.

The sum of a parameter's aliases goes to the parameter as the gradient of one plain layer would: its hooks are called
with it once. A tensor that a layer or the loss function has captured gets its gradient directly. If that is a
parameter, its ``.grad`` from before the step is set aside meanwhile, so that a step that fails can put it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.torch_internals import has_gradient_hooks
from torchgpipe.devices.typing import Leaf
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.gradients.replicas import add_over_replicas
from torchgpipe.gradients.set_aside import SetAside
from torchgpipe.gradients.sums import refusal, sum_of
from torchgpipe.graph.function import accumulate
from torchgpipe.graph.unheard import hook_first
from torchgpipe.processes.processes import Processes

__all__ = ["with_gradients"]

T = TypeVar("T")


def with_gradients(
    aliases: Aliases,
    work: Callable[[], tuple[T, Iterable[tuple[Tensor, Leaf]]]],
    processes: Processes | None = None,
) -> T:
    """Run a step, and add its gradients to ``.grad``; if it fails, ``.grad`` is as it was before.

    Args:
        aliases: the aliases of the parameters
        work: runs the program, and returns the result of the step, and the inputs that require grad with their
            gradients
        processes: the processes of the pipeline, whose replicas' gradients are added up
    """
    delivery = _Delivery(aliases.trained)
    try:
        delivery.begin()
        result, entered = work()
        sums = aliases.take()
        if processes is not None and processes.replica_group is not None and sums:
            sums = add_over_replicas(aliases.trained, sums, processes)
        delivery.let_hooks_hear(sums)
        inputs = [(tensor, grad) for tensor, grad in entered if grad is not None]
        if inputs:
            torch.autograd.backward([tensor for tensor, _ in inputs], [grad for _, grad in inputs])
        delivery.end(sums)
        return result
    except BaseException:
        aliases.take()
        delivery.undo()
        raise


class _Delivery:
    """The way of gradients into ``.grad`` at the end of a step.

    What was in ``.grad`` before is set aside. An optimizer that steps in a hook is not undone.

    Args:
        parameters: the parameters
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        heard = [not one.is_leaf or has_gradient_hooks(one) for one in parameters]
        #: The numbers of the parameters with hooks, or with a graph of their own, and of all others.
        self._heard = [k for k, is_heard in enumerate(heard) if is_heard]
        self._quiet = [k for k, is_heard in enumerate(heard) if not is_heard]
        self._parameters = parameters
        self._heard_before: list[Leaf] = [parameters[k].grad for k in self._heard]
        self._quiet_before = SetAside([parameters[k] for k in self._quiet])
        #: Gradients from before that the hooks have seen added to in place, each with a copy.
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._guards: list[Any] = []

    def begin(self) -> None:
        """Set aside what was in ``.grad``."""
        self._quiet_before.begin()
        for k in self._heard:
            self._parameters[k].grad = None
            self._guards.append(_guard(self._parameters[k]))

    def let_hooks_hear(self, sums: Sequence[Leaf]) -> None:
        """Let sums arrive at parameters with hooks as the gradients of one backward pass do."""
        self._unguard()
        for k, before in zip(self._heard, self._heard_before):
            self._parameters[k].grad = before
            if before is not None and sums[k] is not None:
                self._copies.append((before, before.detach().clone()))
        pairs = [(get_gradient_edge(self._parameters[k]), total) for k in self._heard if (total := sums[k]) is not None]
        if pairs:
            edges, totals = zip(*pairs)
            accumulate(edges, totals, keep_graph=False)

    @torch.no_grad()
    def end(self, sums: Sequence[Leaf]) -> None:
        """Add the sums of all other parameters to what was set aside; the last thing that may not fail."""
        # What is in `.grad` by now is of a parameter that a layer has captured.
        self._quiet_before.end([sum_of(self._parameters[k].grad, sums[k]) for k in self._quiet])

    def undo(self) -> None:
        """Put everything back that was there at the beginning, unless `end` has added all sums."""
        self._unguard()
        if self._quiet_before.has_ended:
            return
        self._quiet_before.undo()
        for k, before in zip(self._heard, self._heard_before):
            self._parameters[k].grad = before
        for before, copied in self._copies:
            before.detach().copy_(copied)

    def _unguard(self) -> None:
        for handle in self._guards:
            handle.remove()


def _guard(parameter: Tensor) -> Any:
    """Refuse gradients that do not come from an alias, of which the hooks of a parameter would hear each part."""

    def refuse(_: Leaf) -> None:
        raise refusal(parameter)

    return hook_first(parameter, refuse)
