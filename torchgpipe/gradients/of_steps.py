"""The way of the gradients of a step from aliases into ``.grad``: either all of them arrive, or none.

The sum of a parameter's aliases goes to the parameter as the gradient of one plain layer would: its hooks are called
with it once. A tensor that a layer or the loss function has captured gets its gradient directly. If that is a
parameter, its ``.grad`` from before the step is set aside meanwhile, so that a step that fails can put it back. An
optimizer that steps in a hook is not undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
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
    aliases: Aliases, work: Callable[[], tuple[T, Iterable[tuple[Tensor, Leaf]]]], processes: Processes | None = None
) -> T:
    """Run a step, and add its gradients to ``.grad``; if it fails, ``.grad`` is as it was before.

    Args:
        aliases: the aliases of the parameters
        work: runs the program, and returns the result of the step, and the inputs that require grad with their
            gradients
        processes: the processes of the pipeline, whose replicas' gradients are added up
    """
    trained, heard, quiet = aliases.trained, list[int](), list[int]()
    for k, parameter in enumerate(trained):
        (heard if not parameter.is_leaf or has_gradient_hooks(parameter) else quiet).append(k)
    before, aside = [trained[k].grad for k in heard], SetAside([trained[k] for k in quiet])
    #: Gradients from before that the hooks have seen added to in place, each with a copy.
    copies: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as guards:
        try:
            aside.begin()
            for k in heard:
                trained[k].grad = None
                guards.callback(_guard(trained[k]).remove)
            result, entered = work()
            sums = aliases.take()
            if processes is not None and processes.replica_group is not None and sums:
                sums = add_over_replicas(trained, sums, processes)
            guards.close()
            for k, grad in zip(heard, before):
                trained[k].grad = grad
                if grad is not None and sums[k] is not None:
                    copies.append((grad, grad.detach().clone()))
            # As the gradients of one backward pass do.
            pairs = [(get_gradient_edge(trained[k]), total) for k in heard if (total := sums[k]) is not None]
            if pairs:
                edges, totals = zip(*pairs)
                accumulate(edges, totals, keep_graph=False)
            inputs = [(tensor, grad) for tensor, grad in entered if grad is not None]
            if inputs:
                torch.autograd.backward([tensor for tensor, _ in inputs], [grad for _, grad in inputs])
            # The last that may not fail. What is in `.grad` by now is of a parameter that a layer has captured.
            with torch.no_grad():
                aside.end([sum_of(trained[k].grad, sums[k]) for k in quiet])
            return result
        except BaseException:
            aliases.take()
            guards.close()
            if not aside.has_ended:
                aside.undo()
                for k, grad in zip(heard, before):
                    trained[k].grad = grad
                for grad, copied in copies:
                    grad.detach().copy_(copied)
            raise


def _guard(parameter: Tensor) -> Any:
    """Refuse gradients that do not come from an alias, of which the hooks of a parameter would hear each part."""

    def refuse(_: Leaf) -> None:
        raise refusal(parameter)

    return hook_first(parameter, refuse)
