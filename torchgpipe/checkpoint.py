"""Running a part of the model twice to keep less of it: checkpointing at forward, recomputation at backward.

The two halves of backward are two autograd functions that share a `Recomputation`:

    forward   inputs, parameters ──► Checkpoint ──► outputs
                                         └─phony──► Recompute ──phony──► the next cell of this device
    backward  1. Recompute runs the function again, now with a graph.
              2. Checkpoint differentiates that graph, when the gradient of the outputs has arrived.

`Recompute` takes nothing but a phony from `Checkpoint`, so the engine may run it before the gradient is there;
and it hands the phony on to the `Checkpoint` of the next micro-batch, so it runs after that one is through:
no more than one recomputed micro-batch is alive on a device. Where one thread runs all cells, the engine takes
nodes in the reverse order of their creation anyway, and nothing is gained by starting early. There is no
`Recompute` there, and `Checkpoint` runs the function again itself.

A `Checkpoint` whose graph is needed at once, when backward starts, runs its function with a graph and keeps that. It
has no second run, and is differentiated like the others.

The gradients of parameters are summed beside the engine (see `accumulation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import parametrize

from torchgpipe.accumulation import Accumulation
from torchgpipe.ambient import Ambient
from torchgpipe.backward_pass import keeps_graph
from torchgpipe.function import Function, gradients
from torchgpipe.hooks import without_hooks
from torchgpipe.phase import checkpointing, recomputing
from torchgpipe.phony import get_phony
from torchgpipe.random import Drawn, RandomStates, replay
from torchgpipe.typing import Leaf, Leaves

__all__ = ["Checkpoint", "End", "Ends", "Recomputation", "Recompute", "Site"]


#: Where gradients enter or leave a graph: a tensor, or the place where it was.
End = Tensor | GradientEdge
Ends = Sequence[End | None]


class Site:
    """What all the recomputations of one place in the model share during a call of the pipeline.

    Attributes:
        where: names the place, for errors
        parameters: the tensors that require grad and that the place uses beside its leaves
        ambient: what the caller has set
        random: notes what is drawn here
        phony: the device of the phonies that carry the order of the micro-batches, None if nothing has to
        accumulation: sums the gradients of the parameters, None if there are none
    """

    where: str
    parameters: tuple[Tensor, ...]
    ambient: Ambient
    random: RandomStates
    phony: torch.device | None
    accumulation: Accumulation | None = None

    def versions(self) -> list[int]:
        """The versions of all parameters, which count changes in place."""
        raise NotImplementedError

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a parameter of the place, though it may not have required grad at the call."""
        raise NotImplementedError

    def changed(self) -> str | None:
        """What about the place is not as it was at the call, if anything."""
        raise NotImplementedError

    def again(self) -> AbstractContextManager[None]:
        """Entered around every second run."""
        raise NotImplementedError


class Recomputation:
    """What `Checkpoint` and `Recompute` share: a function that runs twice, the second time like the first.

    Args:
        site: where it runs
        twice: False if it is to run once, with a graph that is kept
    """

    __slots__ = ("_drawn", "_graph", "_versions", "runs_twice", "site")

    site: Site
    runs_twice: bool
    _drawn: Drawn
    _graph: tuple[Ends, Ends] | None
    _versions: list[int]

    def __init__(self, site: Site, *, twice: bool = True) -> None:
        self.site = site
        self.runs_twice = twice
        self._graph = None

    def compute(self, leaves: Leaves) -> Leaves:
        """The function."""
        raise NotImplementedError

    def failed(self, error: BaseException, phase: str) -> None:
        """Is told of an error at backward; ``phase`` is ``'recomputation'`` or ``'backward'``."""
        raise NotImplementedError

    def first_run(self, leaves: Leaves) -> Leaves:
        """Runs the function, without a graph if there will be a second run."""
        versions = _versions(leaves)
        self._forget()
        outputs = self._run_without_graph(leaves) if self.runs_twice else self._run_with_graph(leaves)
        self._forget()
        if _versions(leaves) != versions:
            raise RuntimeError(
                f"{self.site.where} changes its input in place, so recomputation would start from another input; "
                "let it work on a copy (input.clone()), let its first layer have the attribute inplace=True, "
                "which makes the pipeline copy the input, or use checkpoint='never'"
            )
        return outputs

    def _run_without_graph(self, leaves: Leaves) -> Leaves:
        site = self.site
        before = site.random.begin()
        outputs = checkpointing(self.compute, leaves)
        self._drawn = site.random.end(before)
        self._versions = site.versions()
        return outputs

    def _run_with_graph(self, leaves: Leaves) -> Leaves:
        self.site.random.forget()
        phony = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            inputs = tuple([None if leaf is None else _start(leaf, phony) for leaf in leaves])
            outputs = self.compute(inputs)
        self._verify_graph((phony,), outputs)
        # Not the tensors, which are to go when all others are through with them.
        self._graph = _edges(inputs), _edges(outputs)
        return outputs

    def second_run(self, checkpoint: Any) -> None:
        """Runs the function again, with a graph, on aliases of what the first run was given.

        Args:
            checkpoint: the node of `Checkpoint`, which has saved that
        """
        try:
            self._refuse_changed()
            self.site.ambient.run(self._recompute, checkpoint.saved_tensors)
        except BaseException as error:
            self.failed(error, "recomputation")
            raise

    def _recompute(self, saved: Leaves) -> None:
        inputs = _aliases(saved)
        self._forget()
        with self.site.again(), replay(self._drawn):
            outputs = recomputing(self.compute, inputs)
        self._forget()
        self._verify_graph(inputs, outputs)
        self._graph = _in_graph(inputs), _in_graph(outputs)

    def differentiate(self, checkpoint: Any, grads: Leaves) -> list[Tensor | None]:
        """The gradients of the leaves and the small parameters, in this order; empty if there are none.

        Those of the large parameters are added to their sums. The graph of the last run is used up. If there is none,
        the function is run on what ``checkpoint`` has saved.
        """
        keep_graph = not self.runs_twice and keeps_graph()
        if all([grad is None for grad in grads]):
            if not keep_graph:
                self._graph = None
            return []
        if self._graph is None:
            if not self.runs_twice:
                raise self._used_up()
            self.second_run(checkpoint)
        assert self._graph is not None
        leaves, outputs = self._graph
        if not keep_graph:
            self._graph = None
        accumulation = self.site.accumulation
        inputs = leaves if accumulation is None else (*leaves, *_in_graph(accumulation.small))
        wanted = [one for one in inputs if one is not None]
        differentiate = partial(self._gradients, outputs, grads, keep_graph)
        try:
            sums = None if accumulation is None else accumulation.sums(grads)
            with without_hooks([one for one in (*wanted, *self.site.parameters) if isinstance(one, Tensor)]):
                result = differentiate(wanted) if sums is None else sums.add_all(differentiate, wanted)
        except BaseException as error:
            self.failed(error, "backward")
            raise
        rest = iter(result)
        return [None if one is None else next(rest) for one in inputs]

    def _gradients(self, outputs: Ends, grads: Leaves, keep_graph: bool, wanted: list[End]) -> Sequence[Tensor | None]:
        if len(outputs) != len(grads):
            raise RuntimeError(
                f"{self.site.where} returned {len(outputs)} values in recomputation but {len(grads)} before; it "
                "must do the same both times, or run with checkpoint='never'"
            )
        roots, root_grads = [], []
        for output, grad in zip(outputs, grads):
            if output is not None and grad is not None:
                roots.append(output)
                root_grads.append(grad)
        if not roots or not wanted:
            return [None] * len(wanted)
        return gradients(roots, root_grads, wanted, keep_graph=keep_graph)

    def _forget(self) -> None:
        """What one run has computed from parameters is not for the other, of which one has a graph and one has not."""
        if self.site.ambient.autocast_caches:
            torch.clear_autocast_cache()
        if parametrize._cache_enabled:
            parametrize._cache.clear()

    def _refuse_changed(self) -> None:
        """Raises if a second run would not do what the first did."""
        change = self.site.changed()
        if change is None and self.site.versions() != self._versions:
            change = "a parameter was changed in place since"
        if change is not None:
            raise RuntimeError(
                f"{self.site.where} is not what it was at forward ({change}), so recomputation would give other "
                "gradients; call backward() before optimizer.step(), train() and eval(), or use checkpoint='never'"
            )

    def _verify_graph(self, leaves: Leaves, outputs: Leaves) -> None:
        """Raises if a gradient would get lost, one that belongs to neither the leaves nor the parameters."""
        for output in outputs:
            if output is not None and output.is_leaf and output.requires_grad and not self._knows(leaves, output):
                raise self._captured(output)
        for node in _ends(outputs, self.site.accumulation):
            if type(node).__name__ == "AccumulateGrad" and not self._knows(leaves, node.variable):
                raise self._captured(node.variable)

    def _knows(self, leaves: Leaves, tensor: Tensor) -> bool:
        # A parameter that was frozen at the call, and is no more, gets no gradient from the plain model either.
        return any([tensor is leaf for leaf in leaves]) or self.site.owns(tensor)

    def _used_up(self) -> RuntimeError:
        return RuntimeError(
            f"{self.site.where} was differentiated a second time, but its graph is freed by the first; call "
            "backward(retain_graph=True) before"
        )

    def _captured(self, tensor: Tensor) -> RuntimeError:
        return RuntimeError(
            f"{self.site.where} uses a tensor of shape {tuple(tensor.shape)} that requires grad but is neither its "
            "input nor a parameter of its layers, so recomputation would lose the gradient; register it as a "
            "parameter of the layer, pass it as an input, or use checkpoint='never'"
        )


def _aliases(leaves: Leaves) -> Leaves:
    """The same tensors, as leaves of a new graph."""
    return tuple([None if leaf is None else leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves])


def _in_graph(tensors: Leaves) -> Leaves:
    return tuple([one if one is not None and one.requires_grad else None for one in tensors])


def _edges(tensors: Leaves) -> list[GradientEdge | None]:
    return [get_gradient_edge(one) if one is not None and one.requires_grad else None for one in tensors]


def _ends(outputs: Leaves, parameters: Accumulation | None) -> list[Any]:
    """The nodes where the graph of ``outputs`` ends, beside the parameters."""
    seen = {None} if parameters is None else {None, *parameters.nodes}
    edges = () if parameters is None else parameters.edges
    pending: list[Any] = list({output.grad_fn for output in outputs if output is not None} - seen)
    seen.update(pending)
    ends = []
    while pending:
        node = pending.pop()
        following = node.next_functions
        if not following:
            ends.append(node)
        for edge in following:
            if edge[0] not in seen and edge not in edges:
                seen.add(edge[0])
                pending.append(edge[0])
    return ends


def _versions(leaves: Leaves) -> list[int]:
    return [leaf._version for leaf in leaves if leaf is not None and not leaf.is_inference()]


class Checkpoint(Function):
    """Forward: the first run. Backward: differentiates the last run.

    Its arguments are the recomputation; the lane, a phony from the micro-batch before, or None; the phony of the
    accumulation, or None; and then the leaves and the small parameters. Where the site has a phony, that comes before
    the outputs.
    """

    @staticmethod
    def forward(ctx: Any, recomputation: Recomputation, _lane: Leaf, _sums: Leaf, *tensors: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        accumulation = recomputation.site.accumulation
        leaves = tensors if accumulation is None else tensors[: len(tensors) - len(accumulation.small)]
        outputs = recomputation.first_run(leaves)
        if recomputation.runs_twice:
            ctx.save_for_backward(*leaves)
        # Aliases, because an output that is an input, or a view of one, would bring that one's history.
        aliases = tuple([None if output is None else output.detach() for output in outputs])
        phony = recomputation.site.phony
        return aliases if phony is None else (get_phony(phony), *aliases)

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        _refuse_create_graph()
        recomputation: Recomputation = ctx.recomputation
        phony = recomputation.site.phony
        result = recomputation.differentiate(ctx, grads if phony is None else grads[1:])
        _, has_lane, _, *tensors = ctx.needs_input_grad
        lane = get_phony(phony) if phony is not None and has_lane else None
        return None, lane, None, *(result or [None] * len(tensors))


class Start(Function):
    """Where a graph that is kept starts. A leaf would keep the input, and its hooks are muted.

    Forward: ``x``, of which the graph does not know where it comes from. Backward is never run: the gradient of ``x``
    is taken before it.
    """

    @staticmethod
    def forward(ctx: Any, _phony: Tensor, x: Tensor) -> Tensor:
        return x.detach()


def _start(leaf: Tensor, phony: Tensor) -> Tensor:
    inside: Tensor = Start.apply(phony, leaf.detach()) if leaf.requires_grad else leaf
    return inside


class Recompute(Function):
    """Forward: nothing. Backward: the second run of the checkpoint that ``x`` comes from."""

    @staticmethod
    def forward(ctx: Any, checkpoint: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.checkpoint = checkpoint
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        _refuse_create_graph()
        ctx.checkpoint.recomputation.second_run(ctx.checkpoint)
        return None, grad


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True cannot go through a checkpointed partition, whose graph is freed as soon as it "
            "has been differentiated; use checkpoint='never' for gradients of gradients"
        )
