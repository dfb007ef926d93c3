"""What the cells of one partition share during one call of the pipeline.

Layers and parameters can be replaced between two calls, so everything here is looked up anew for each call. It
outlives the call where the autograd graph does: a recomputation compares the layers with those that the call found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.stream import Stream
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.copy import Route
from torchgpipe.engine.function import Edge
from torchgpipe.engine.gradients import ParameterGradients, add_to_grad
from torchgpipe.engine.out_of_memory import MiniBatchFacts
from torchgpipe.engine.portal import Portal
from torchgpipe.engine.record import Listener
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition
from torchgpipe.model.state import copy_of_state, may_be_state, memory_of_state
from torchgpipe.model.views import starts_in_place
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.replay.runs import Layers
from torchgpipe.skip.layout import is_skippable
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["PartitionCall"]


class PartitionCall:
    """A partition during one call of the pipeline.

    Args:
        partition: its layers
        modules: all modules in the partition
        stream: the stream that the partition computes on
        arriving: the route of its inputs; None if the inputs are on its device already
        leaving: the route of its outputs; None if the outputs stay on its device
        sending: the portals of skips that its layers stash for later partitions
        receiving: the portals of skips that its layers pop and earlier partitions have stashed
        ambient: the caller's settings
        random: notes the random numbers that are drawn on its device
        ordered: whether cells have to be tied to each other, because several threads run them
        replicated: whether DistributedDataParallel is around the call
        in_program: whether a program runs backward, while the layers have aliases of their parameters
        listener: the listener of this mini-batch, if there is one

    Attributes:
        j: the index of the partition
        facts: what a note about memory is made from; None in a step, which makes these notes itself
        in_program: whether a program runs backward, and not a backward pass of the caller
        lane_device: the device of the phonies that carry the order of the micro-batches; None if ``ordered`` is False
        layers: what the runs of its modules share
        parameters: the parameters that require grad
        frozen: the parameters that do not
    """

    def __init__(
        self,
        partition: Partition,
        modules: Sequence[nn.Module],
        stream: Stream,
        *,
        arriving: Route | None,
        leaving: Route | None,
        sending: Sequence[Portal],
        receiving: Sequence[Portal],
        ambient: Ambient,
        random: RandomStates,
        ordered: bool,
        replicated: bool = False,
        in_program: bool = False,
        listener: Listener | None = None,
    ) -> None:
        self.j = partition._index
        self.device = stream.device
        self.stream = stream
        self.arriving = arriving
        self.leaving = [] if leaving is None else [leaving]
        self.leaving += [portal.route for portal in sending if portal.route is not None]
        self.sending = sending
        self.receiving = receiving
        self.ambient = ambient
        self.random = random
        self.lane_device = stream.device if ordered else None
        self.listener = listener
        self.in_program = in_program
        self.facts: MiniBatchFacts | None = None
        self._replicated = replicated

        self._partition = partition
        # Not the partition itself: it is a view, and takes over the model's mode whenever the model is called.
        self.layers = Layers(
            [module for module in modules if module is not partition],
            random,
            lambda: f"{partition._label} on {stream.device}",
            copying="let it work on a copy (input.clone()), let its first layer have the attribute inplace=True, which "
            "makes the pipeline copy the input",
            otherwise="use checkpoint='never'",
        )
        owned = self.layers.parameters
        parameters = [parameter for parameter in owned if not is_lazy(parameter)]
        self.parameters = tuple([parameter for parameter in parameters if parameter.requires_grad])
        self.frozen = tuple([parameter for parameter in parameters if not parameter.requires_grad])
        self._trains = ambient.builds_graph and any([parameter.requires_grad for parameter in owned])

        source = f"the output of layer '{[*partition._modules][-1]}' ({type(partition[-1]).__name__})"
        self._run: Callable[[Batch], Batch] = partial(_run, partition, source)
        if any(is_skippable(module) for module in modules):
            self._run = partial(_run_with_skips, self._run, sending, receiving)
        if starts_in_place(partition):
            self._run = partial(_run_on_copies, self._run)

    @property
    def running(self) -> int:
        """The index of the partition that runs, where neighbours are joined."""
        return self._partition._running._index

    @property
    def where(self) -> str:
        """The partition that runs, for errors."""
        return self.layers.where()

    def needs_grad(self, leaves: Leaves) -> bool:
        """Return whether there is anything to differentiate in a cell with these input leaves."""
        if self._trains or not self.ambient.builds_graph:
            return self._trains
        return any([leaf is not None and leaf.requires_grad for leaf in leaves])

    def by_itself(self) -> RuntimeError:
        """Return the error for a tensor of a cell that something else than the pipeline differentiates."""
        return RuntimeError(
            f"a tensor from the midst of {self.where} was differentiated by itself, so the layers before it would not "
            "get its gradient; return it as an output of the layers, or use checkpoint='never'"
        )

    def sink(
        self, edges: Sequence[Edge], grads: Sequence[Tensor], leaves: Sequence[Tensor], keep_graph: bool
    ) -> list[Leaf]:
        """Differentiate a graph, and take the gradients of parameters to where they are wanted; see `Sink`."""
        if self.in_program:
            return add_to_grad(self.parameters, edges, grads, leaves, keep_graph=keep_graph)
        return self.gradients.differentiate(edges, grads, leaves, keep_graph=keep_graph)

    @cached_property
    def gradients(self) -> ParameterGradients:
        """The gradients of the parameters; made by the first cell that is a graph of its own."""
        return ParameterGradients(self.parameters, self.frozen, self.device, replicated=self._replicated)

    def forget_casts(self) -> None:
        """Clear the casts that autocast keeps, so that a later call casts weights anew; a step does so at its end."""
        if self.ambient.autocast_caches and not self.in_program:
            torch.clear_autocast_cache()

    @cached_property
    def _state(self) -> Set[int]:
        # Looked for once, when an output may be a part of it.
        return memory_of_state(self._partition)

    def run_layers(self, batch: Batch) -> Batch:
        """Return the output of a cell, given its input.

        Skips that arrive follow the leaves of the input, and skips that leave follow the leaves of the output. Tensors
        that a layer keeps and changes in place are copied; see `model.state`.
        """
        output = self._run(batch)
        if any([leaf is not None and may_be_state(leaf) for leaf in output.leaves]) and (state := self._state):
            output.leaves = tuple([leaf if leaf is None else copy_of_state(state, leaf) for leaf in output.leaves])
        return output


def _run(partition: Partition, source: str, batch: Batch) -> Batch:
    # `batch.of`, because a front such as the old Pipe has another kind of Batch.
    return batch.of(batch.pass_to(partition), source)


def _run_with_skips(
    run: Callable[[Batch], Batch], sending: Sequence[Portal], receiving: Sequence[Portal], batch: Batch
) -> Batch:
    width = len(batch.leaves) - len(receiving)
    tracker = SkipTracker(zip([portal.key for portal in receiving], batch.leaves[width:]))
    # Without the skips, or the batch would keep a skip alive beyond the layer that pops it.
    batch.leaves = batch.leaves[:width]
    with tracker:
        output = run(batch)
    return output.replace(output.leaves + tracker.take([portal.key for portal in sending]))


def _run_on_copies(run: Callable[[Batch], Batch], batch: Batch) -> Batch:
    # Else the first layer would change the user's mini-batch, and what a recomputation starts from.
    batch.leaves = tuple([None if leaf is None else leaf.clone() for leaf in batch.leaves])
    return run(batch)
