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

The parameters are inputs of `Checkpoint`, but for the large ones, whose gradients are summed beside it (see
`accumulation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from torchgpipe.accumulation import Accumulation, Source, explore
from torchgpipe.ambient import Ambient
from torchgpipe.backward_pass import keeps_graph
from torchgpipe.function import Function, gradients
from torchgpipe.hooks import without_hooks
from torchgpipe.phase import checkpointing, recomputing
from torchgpipe.phony import get_phony
from torchgpipe.random import Drawn, RandomStates
from torchgpipe.typing import Leaf, Leaves

__all__ = ["Checkpoint", "Recomputation", "Recompute", "Site"]


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
    """

    __slots__ = ("_drawn", "_graph", "_versions", "site")

    site: Site
    _drawn: Drawn | None
    _graph: tuple[Leaves, Leaves, list[Source]] | None
    _versions: list[int]

    def __init__(self, site: Site) -> None:
        self.site = site
        self._graph = None

    def compute(self, leaves: Leaves) -> Leaves:
        """The function."""
        raise NotImplementedError

    def failed(self, error: BaseException, phase: str) -> None:
        """Is told of an error at backward; ``phase`` is ``'recomputation'`` or ``'backward'``."""
        raise NotImplementedError

    def first_run(self, leaves: Leaves) -> Leaves:
        """Runs the function without a graph."""
        site = self.site
        _forget_parametrizations()
        versions = _versions(leaves)
        before = site.random.begin()
        outputs = checkpointing(self.compute, leaves)
        self._drawn = site.random.end(before)
        self._versions = site.versions()
        self._forget_casts()
        _forget_parametrizations()
        if _versions(leaves) != versions:
            raise RuntimeError(
                f"{self.site.where} changes its input in place, so recomputation would start from another input; "
                "let it work on a copy (input.clone()), let its first layer have the attribute inplace=True, "
                "which makes the pipeline copy the input, or use checkpoint='never'"
            )
        return outputs

    def second_run(self, checkpoint: Any) -> None:
        """Runs the function again, with a graph, on aliases of what the first run was given.

        Args:
            checkpoint: the node of `Checkpoint`, which has saved that
        """
        try:
            self._refuse_changed()
            self._graph = self.site.ambient.run(self._recompute, checkpoint.saved_tensors)
        except BaseException as error:
            self.failed(error, "recomputation")
            raise

    def _recompute(self, saved: Leaves) -> tuple[Leaves, Leaves, list[Source]]:
        if self._drawn is None:
            raise RuntimeError(
                f"{self.site.where} draws random numbers that are forgotten: a backward pass was through with it and "
                "failed afterwards; call the pipeline again before the next backward()"
            )
        leaves = tuple([None if leaf is None else leaf.detach().requires_grad_(leaf.requires_grad) for leaf in saved])
        _forget_parametrizations()
        with self.site.again(), self.site.random.replay(self._drawn):
            outputs = recomputing(self.compute, leaves)
        self._forget_casts()
        _forget_parametrizations()
        return leaves, outputs, self._sources(leaves, outputs)

    def differentiate(self, checkpoint: Any, grads: Leaves) -> list[Tensor | None]:
        """The gradients of the leaves and the small parameters, in this order; empty if there are none.

        Those of the large parameters are added to their sums. The graph of the last second run is used up. If there
        is none, it is run on what ``checkpoint`` has saved.
        """
        if all([grad is None for grad in grads]):
            self._graph = None
            return []
        if self._graph is None:
            self.second_run(checkpoint)
            assert self._graph is not None
        (leaves, outputs, sources), self._graph = self._graph, None
        accumulation = self.site.accumulation
        inputs = leaves if accumulation is None else (*leaves, *accumulation.small)
        wanted = [one for one in inputs if one is not None and one.requires_grad]
        width = len(wanted)
        try:
            sums = None if accumulation is None else accumulation.sums()
            if accumulation is None or sums is None:
                result = self._gradients(outputs, grads, wanted)
            else:
                trained = [k for k, parameter in accumulation.large.items() if parameter.requires_grad]
                wanted += [accumulation.large[k] for k in trained]
                hooks = sums.take_from(sources)
                try:
                    result = self._gradients(outputs, grads, wanted)
                finally:
                    for hook in hooks:
                        hook.remove()
                for k, grad in zip(trained, result[width:]):
                    if grad is not None:  # No hook has taken it.
                        sums.add(k, grad)
        except BaseException as error:
            self.failed(error, "backward")
            raise
        if self._drawn and not keeps_graph():
            self._drawn = None  # It goes with what the engine lets go of: a generator's state takes kilobytes.
        rest = iter(result)
        return [next(rest) if one is not None and one.requires_grad else None for one in inputs]

    def _gradients(self, outputs: Leaves, grads: Leaves, wanted: list[Tensor]) -> Sequence[Tensor | None]:
        if len(outputs) != len(grads):
            raise RuntimeError(
                f"{self.site.where} returned {len(outputs)} values in recomputation but {len(grads)} before; it "
                "must do the same both times, or run with checkpoint='never'"
            )
        roots, root_grads = [], []
        for output, grad in zip(outputs, grads):
            if output is not None and grad is not None and output.requires_grad:
                roots.append(output)
                root_grads.append(grad)
        if not roots or not wanted:
            return [None] * len(wanted)
        with without_hooks(wanted):
            return gradients(roots, root_grads, wanted)

    def _forget_casts(self) -> None:
        # Autocast would hand the casted weights of a run without a graph to one that needs their gradient.
        if self.site.ambient.autocast_caches:
            torch.clear_autocast_cache()

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

    def _sources(self, leaves: Leaves, outputs: Leaves) -> list[Source]:
        """Where the large gradients of parameters come from.

        Raises:
            RuntimeError: a gradient would get lost, one that belongs to neither the leaves nor the parameters
        """
        for output in outputs:
            if output is not None and output.is_leaf and output.requires_grad and not self._knows(leaves, output):
                raise self._captured(output)
        accumulation = self.site.accumulation
        sources, ends = explore(outputs, {} if accumulation is None else accumulation.edges)
        for node in ends:
            if type(node).__name__ == "AccumulateGrad" and not self._knows(leaves, node.variable):
                raise self._captured(node.variable)
        return sources

    def _knows(self, leaves: Leaves, tensor: Tensor) -> bool:
        # A parameter that was frozen at the call, and is no more, gets no gradient from the plain model either.
        return any([tensor is leaf for leaf in leaves]) or self.site.owns(tensor)

    def _captured(self, tensor: Tensor) -> RuntimeError:
        return RuntimeError(
            f"{self.site.where} uses a tensor of shape {tuple(tensor.shape)} that requires grad but is neither its "
            "input nor a parameter of its layers, so recomputation would lose the gradient; register it as a "
            "parameter of the layer, pass it as an input, or use checkpoint='never'"
        )


def _forget_parametrizations() -> None:
    # Within `parametrize.cached()`, likewise: what one run has computed from parameters is not for the other.
    if parametrize._cache_enabled:
        parametrize._cache.clear()


def _versions(leaves: Leaves) -> list[int]:
    return [leaf._version for leaf in leaves if leaf is not None and not leaf.is_inference()]


class Checkpoint(Function):
    """Forward: the first run. Backward: differentiates the second run.

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
