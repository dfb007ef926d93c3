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

The parameters are no inputs of `Checkpoint`: their gradients go another way (see `gradients`).

With 'except_last', the last micro-batch would be recomputed at once, so it keeps the graph of its only run instead
(`Keep`). That is a graph of its own as well. If it were part of the caller's graph, the engine would hold its gradients
until those of all other micro-batches are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize

from torchgpipe.devices.backward_pass import keeps_graph
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.function import Edge, Function
from torchgpipe.engine.gradients import ParameterGradients
from torchgpipe.engine.phony import get_phony
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.phase import checkpointing, recomputing
from torchgpipe.replay.random import Drawn, RandomStates

__all__ = ["Checkpoint", "Keep", "Recomputation", "Recompute", "Site"]


class Site:
    """What all the recomputations of one place in the model share during a call of the pipeline.

    Attributes:
        where: names the place, for errors
        parameters: the tensors that require grad and that the place uses beside its leaves
        ambient: what the caller has set
        random: notes what is drawn here
        phony: the device of the phonies that carry the order of the micro-batches, None if nothing has to
    """

    where: str
    parameters: tuple[Tensor, ...]
    ambient: Ambient
    random: RandomStates
    phony: torch.device | None

    @property
    def gradients(self) -> ParameterGradients:
        """Where the gradients of the parameters go."""
        raise NotImplementedError

    def versions(self) -> list[int]:
        """The versions of all parameters, which count changes in place."""
        raise NotImplementedError

    def changed(self) -> str | None:
        """What about the place is not as it was at the call, if anything."""
        raise NotImplementedError

    def again(self) -> AbstractContextManager[None]:
        """Entered around every second run."""
        raise NotImplementedError


class _Entrance:
    """The inputs of a graph that is kept, without their memory, which the graph may not need.

    Attributes:
        leaf: where the graph ends, in place of the inputs
    """

    __slots__ = ("_taken", "_where", "leaf")

    def __init__(self, where: str, device: torch.device) -> None:
        self.leaf = get_phony(device).requires_grad_()
        self._where = where
        #: By thread, what a backward pass of the cell has taken: two threads may differentiate a graph that is kept.
        self._taken: dict[int, list[Leaf]] = {}

    def enter(self, leaves: Leaves) -> Leaves:
        """Return the inputs for a graph that begins here."""
        # Detached, or the graph would go on into the caller's.
        trained = [leaf.detach() for leaf in leaves if leaf is not None and leaf.requires_grad]
        entered = iter(Enter.apply(self, self.leaf, *trained) if trained else ())
        return tuple([next(entered) if leaf is not None and leaf.requires_grad else leaf for leaf in leaves])

    def take(self, grads: Leaves) -> None:
        """Take the gradients of the inputs.

        Raises:
            RuntimeError: they come from elsewhere than the outputs of the cell.
        """
        taken = self._taken.get(get_ident())
        if taken is None:
            raise RuntimeError(
                f"a tensor from the midst of {self._where} was differentiated by itself, so the layers before that "
                "would not get its gradient; return it as an output of the layers, or use checkpoint='never'"
            )
        taken[:] = grads

    @contextmanager
    def taking(self) -> Iterator[list[Leaf]]:
        """Give the gradients of the inputs that require grad, once a backward pass in the ``with`` block has them."""
        here = get_ident()
        outer = self._taken.get(here)  # The pass may start from the midst of another one, through the same graph.
        taken: list[Leaf] = []
        self._taken[here] = taken
        try:
            yield taken
        finally:
            if outer is None:
                del self._taken[here]
            else:
                self._taken[here] = outer


class Enter(Function):
    """Forward: aliases of the inputs of a graph that is kept. Backward: takes their gradients out of the graph."""

    @staticmethod
    def forward(ctx: Any, entrance: _Entrance, _leaf: Tensor, *leaves: Tensor) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.entrance = entrance
        return tuple([leaf.detach() for leaf in leaves])

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[None, ...]:
        ctx.entrance.take(grads)
        return (None,) * len(ctx.needs_input_grad)


class Recomputation:
    """What `Checkpoint` and `Recompute` share: a function that runs twice, the second time like the first.

    Args:
        site: where it runs
    """

    __slots__ = ("_drawn", "_entrance", "_graph", "_kept", "_versions", "site")

    site: Site
    _drawn: Drawn | None
    #: The inputs, and where the gradients of the outputs enter; None for an output that needs none.
    _graph: tuple[Leaves, list[Edge | None]] | None
    _versions: list[int]
    _entrance: _Entrance
    #: Of a graph that is kept, where the gradients of the outputs enter.
    _kept: list[Edge | None]

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

    def only_run(self, leaves: Leaves) -> Leaves:
        """Runs the function with a graph that begins at its inputs, and keeps the graph."""
        self._entrance = _Entrance(self.site.where, self.site.gradients.phony.device)
        _forget_parametrizations()
        with torch.enable_grad():
            outputs = self.compute(self._entrance.enter(leaves))
        self._forget_casts()
        _forget_parametrizations()
        self._kept = _roots(outputs)
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

    def _recompute(self, saved: Leaves) -> tuple[Leaves, list[Edge | None]]:
        if self._drawn is None:
            raise RuntimeError(
                f"{self.site.where} draws random numbers that are forgotten: a backward pass was through with it and "
                "failed afterwards; call the pipeline again before the next backward()"
            )
        leaves = _aliases(saved)
        _forget_parametrizations()
        with self.site.again(), self.site.random.replay(self._drawn):
            outputs = recomputing(self.compute, leaves)
        self._forget_casts()
        _forget_parametrizations()
        return leaves, _roots(outputs)

    def differentiate(self, checkpoint: Any, grads: Leaves) -> list[Tensor | None]:
        """Returns the gradients of the leaves; an empty list if there are none.

        The graph of the last second run is used up. If there is none, it is run on what ``checkpoint`` has saved.
        """
        if all([grad is None for grad in grads]):
            self._graph = None
            return []
        if self._graph is None:
            self.second_run(checkpoint)
            assert self._graph is not None
        (leaves, roots), self._graph = self._graph, None
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        result = iter(self._differentiate(roots, grads, wanted, keep_graph=False))
        if self._drawn and not keeps_graph():
            self._drawn = None  # It goes with what the engine lets go of: a generator's state takes kilobytes.
        return [next(result) if leaf is not None and leaf.requires_grad else None for leaf in leaves]

    def differentiate_kept(self, grads: Leaves, needed: Sequence[bool]) -> list[Tensor | None]:
        """Returns the gradients of the leaves, likewise, by the graph of the only run.

        Args:
            grads: those of the outputs
            needed: which leaves require grad
        """
        if all([grad is None for grad in grads]):
            return []
        with self._entrance.taking() as taken:
            self._differentiate(self._kept, grads, [self._entrance.leaf] if any(needed) else [], keeps_graph())
        result = iter(taken or [None] * sum(needed))
        return [next(result) if need else None for need in needed]

    def _differentiate(
        self, roots: list[Edge | None], grads: Leaves, wanted: list[Tensor], keep_graph: bool
    ) -> Sequence[Tensor | None]:
        try:
            return self._gradients(roots, grads, wanted, keep_graph)
        except BaseException as error:
            self.failed(error, "backward")
            raise

    def _gradients(
        self, roots: list[Edge | None], grads: Leaves, wanted: list[Tensor], keep_graph: bool
    ) -> Sequence[Tensor | None]:
        if len(roots) != len(grads):
            raise RuntimeError(
                f"{self.site.where} returned {len(roots)} values in recomputation but {len(grads)} before; it "
                "must do the same both times, or run with checkpoint='never'"
            )
        entered = [(root, grad) for root, grad in zip(roots, grads) if root is not None and grad is not None]
        if not entered:
            return [None] * len(wanted)
        gradients = self.site.gradients
        return gradients.differentiate([r for r, _ in entered], [g for _, g in entered], wanted, keep_graph=keep_graph)

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


def _aliases(leaves: Leaves) -> Leaves:
    """Return the inputs as leaves of a graph of their own."""
    return tuple([None if leaf is None else leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves])


def _roots(outputs: Leaves) -> list[Edge | None]:
    return [None if output is None or not output.requires_grad else get_gradient_edge(output) for output in outputs]


def _forget_parametrizations() -> None:
    # Within `parametrize.cached()`, likewise: what one run has computed from parameters is not for the other.
    if parametrize._cache_enabled:
        parametrize._cache.clear()


def _versions(leaves: Leaves) -> list[int]:
    return [leaf._version for leaf in leaves if leaf is not None and not leaf.is_inference()]


class Checkpoint(Function):
    """Forward: the first run. Backward: differentiates the second run.

    Its arguments are the recomputation; the lane, a phony from the micro-batch before, or None; the phony of the
    gradients of parameters; and then the leaves. Where the site has a phony, that comes before the outputs.
    """

    @staticmethod
    def forward(ctx: Any, recomputation: Recomputation, _lane: Leaf, _gradients: Tensor, *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        outputs = recomputation.first_run(leaves)
        ctx.save_for_backward(*leaves)
        phony = recomputation.site.phony
        return _detached(outputs) if phony is None else (get_phony(phony), *_detached(outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        _refuse_create_graph()
        recomputation: Recomputation = ctx.recomputation
        phony = recomputation.site.phony
        result = recomputation.differentiate(ctx, grads if phony is None else grads[1:])
        return None, _on_the_lane(ctx, phony), None, *(result or [None] * (len(ctx.needs_input_grad) - 3))


class Keep(Function):
    """Forward: the only run. Backward: differentiates it. Its arguments are those of `Checkpoint`."""

    @staticmethod
    def forward(ctx: Any, recomputation: Recomputation, _lane: Leaf, _gradients: Tensor, *leaves: Leaf) -> Leaves:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        outputs = recomputation.only_run(leaves)
        aliases = _detached(outputs)
        ctx.mark_non_differentiable(
            *[alias for alias, output in zip(aliases, outputs) if output is not None and not output.requires_grad]
        )
        return aliases

    @staticmethod
    def backward(ctx: Any, *grads: Leaf) -> tuple[Any, ...]:
        _refuse_create_graph()
        recomputation: Recomputation = ctx.recomputation
        needed = ctx.needs_input_grad[3:]
        result = recomputation.differentiate_kept(grads, needed)
        return None, _on_the_lane(ctx, recomputation.site.phony), None, *(result or [None] * len(needed))


def _detached(outputs: Leaves) -> Leaves:
    # Aliases, because an output that is an input, or a view of one, would bring that one's history.
    return tuple([None if output is None else output.detach() for output in outputs])


def _on_the_lane(ctx: Any, phony: torch.device | None) -> Leaf:
    """Return a gradient for the lane, if there is one: on its device, where the engine then goes on."""
    return get_phony(phony) if phony is not None and ctx.needs_input_grad[1] else None


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
