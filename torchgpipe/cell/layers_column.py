"""A column of layers: what the cells of one partition, or of a part of it, share during a mini-batch.

Layers and parameters can be replaced between two mini-batches, so everything here is looked up anew for each. It
outlives the call where the autograd graph does: a recomputation compares the layers with those that the call found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.batch.microbatch import Batch
from torchgpipe.cell.column import Column
from torchgpipe.cell.out_of_memory import MiniBatchFacts, add_shortage
from torchgpipe.cell.views import starts_in_place, views_of_each
from torchgpipe.devices.stream import Stream, Streams
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.gradients.of_calls import ParameterGradients
from torchgpipe.gradients.step_lock import StepLock, calls
from torchgpipe.gradients.sums import add_to_grad
from torchgpipe.graph.function import Edge
from torchgpipe.listener.label import labelled
from torchgpipe.listener.listener import Listener, Place, Recorder
from torchgpipe.model.partition import Partition
from torchgpipe.model.state import copy_of_state, may_be_state, memory_of_state
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.replay.runs import Layers
from torchgpipe.schedule import Action
from torchgpipe.skip.layout import SkipLayout, is_skippable
from torchgpipe.skip.tracker import SkipTracker
from torchgpipe.transport.portal import Portal
from torchgpipe.transport.route import Route

__all__ = ["LayersColumn", "Mechanisms", "begin_step", "make_columns"]


@dataclass(frozen=True)
class Mechanisms:
    """The mechanisms of a pipeline beside its schedule. A test or a benchmark can exchange each of them.

    Attributes:
        streams: the source of streams
        dependency: whether to fix the order of micro-batches at backward
        recorder: the listener to what runs when, if there is one
        lock: held while a call or a step of the pipeline runs, or a part of backward that finds its parameters
    """

    streams: Streams = field(default_factory=Streams)
    dependency: bool = True
    recorder: Recorder | None = None
    lock: StepLock = field(default_factory=StepLock)


class LayersColumn(Column):
    """A column of layers.

    Args:
        j: its number among all columns
        partition: the layers
        modules: all modules among them
        stream: the stream that the column computes on
        m: the number of micro-batches
        arriving: the route of its inputs; None if the inputs are on its device already
        leaving: the route of its outputs; None if the outputs stay on its device
        sending: the portals of skips that its layers stash for later columns
        receiving: the portals of skips that its layers pop and earlier columns have stashed
        ambient: the caller's settings
        random: notes the random numbers that are drawn on its device
        ordered: whether cells have to be tied to each other, because several threads run them
        in_program: whether a program runs backward, while the layers have aliases of their parameters
        listener: the listener of this mini-batch, if there is one
        lock: the lock of the pipeline

    Attributes:
        facts: what a note about memory is made from; None in a program, whose executor makes these notes
        in_program: see above
        lane_device: the device of the phonies that carry the order of the micro-batches; None if ``ordered`` is False
        layers: what the runs of its modules share
    """

    def __init__(
        self,
        j: int,
        partition: Partition,
        modules: Sequence[nn.Module],
        stream: Stream,
        m: int,
        *,
        arriving: Route | None,
        leaving: Route | None,
        sending: Sequence[Portal],
        receiving: Sequence[Portal],
        ambient: Ambient,
        random: RandomStates,
        ordered: bool,
        in_program: bool,
        listener: Listener | None,
        lock: StepLock,
    ) -> None:
        routes = [leaving, *[portal.route for portal in sending]]
        super().__init__(j, "", stream, m, listener, [route for route in routes if route is not None])
        self.arriving = arriving
        self.sending, self.receiving = sending, receiving
        self.ambient, self.random = ambient, random
        self.lane_device = stream.device if ordered else None
        self.in_program = in_program
        self.facts: MiniBatchFacts | None = None
        self._lock, self._calls = lock, calls.get()
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
        self._trained = tuple([parameter for parameter in parameters if parameter.requires_grad])
        self._frozen = tuple([parameter for parameter in parameters if not parameter.requires_grad])
        self._trains = ambient.builds_graph and any([parameter.requires_grad for parameter in owned])
        name, last = [*partition._modules.items()][-1]
        self._source = f"the output of layer '{name}' ({type(last).__name__})"
        self._has_skips = any(map(is_skippable, modules))
        self._starts_in_place = starts_in_place(partition)

    @property
    def where(self) -> str:
        """The partition that runs with its device, for errors."""
        return self.layers.where()

    @property
    def partition(self) -> int:
        """The number of the partition that runs, where neighbours are joined."""
        return self._partition._running._index

    def note(self, error: BaseException, i: int, phase: str) -> None:
        """Add a note that tells the cell and the phase, and what would help if memory has run out."""
        super().note(error, i, phase)
        if self.facts is not None:
            add_shortage(
                error, self.facts, Action("F" if phase == "forward" else "B", i, self.partition), self.stream.device
            )

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
            return add_to_grad(self._trained, edges, grads, leaves, keep_graph=keep_graph)
        return self.gradients.differentiate(edges, grads, leaves, keep_graph=keep_graph)

    @cached_property
    def gradients(self) -> ParameterGradients:
        """The gradients of the parameters; made by the first cell that is a graph of its own."""
        return ParameterGradients(self._trained, self._frozen, self.stream.device)

    def finding_parameters(self) -> AbstractContextManager[None]:
        """Keep steps in other threads from exchanging parameters for a ``with`` block."""
        return self._lock.held(self._calls)

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
        if self._starts_in_place:
            # Else the first layer would change the user's mini-batch, and what a recomputation starts from.
            batch.leaves = tuple([None if leaf is None else leaf.clone() for leaf in batch.leaves])
        output = self._run_with_skips(batch) if self._has_skips else self._run(batch)
        if any([leaf is not None and may_be_state(leaf) for leaf in output.leaves]) and (state := self._state):
            output.leaves = tuple([leaf if leaf is None else copy_of_state(state, leaf) for leaf in output.leaves])
        return output

    def _run(self, batch: Batch) -> Batch:
        # `batch.of`, because a front such as the old Pipe has another kind of Batch.
        return batch.of(batch.pass_to(self._partition), self._source)

    def _run_with_skips(self, batch: Batch) -> Batch:
        width = len(batch.leaves) - len(self.receiving)
        tracker = SkipTracker(zip([portal.key for portal in self.receiving], batch.leaves[width:]))
        # Without the skips, or the batch would keep a skip alive beyond the layer that pops it.
        batch.leaves = batch.leaves[:width]
        with tracker:
            output = self._run(batch)
        return output.replace(output.leaves + tracker.take([portal.key for portal in self.sending]))


def begin_step(
    m: int, partitions: Sequence[Partition], devices: Sequence[torch.device], mechanisms: Mechanisms
) -> Listener | None:
    """Return the listener of a mini-batch of ``m`` micro-batches, or None."""
    if mechanisms.recorder is None:
        return labelled(None)
    streams = [mechanisms.streams.current(device) for device in devices]
    places = [
        Place(streams[views[0]], [name for view in views for name in partitions[view]._modules])
        for views in views_of_each(partitions)
    ]
    return labelled(mechanisms.recorder.begin_step(m, places))


def make_columns(
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    modules: Sequence[list[nn.Module]],
    m: int,
    mechanisms: Mechanisms,
    random: Callable[[torch.device, list[nn.Module]], RandomStates],
    *,
    ambient: Ambient,
    ordered: bool,
    in_program: bool = False,
    listener: Listener | None,
) -> list[LayersColumn]:
    """Return the columns of a mini-batch, with the routes and portals between them.

    Args:
        partitions: the layers of each column, on their devices
        devices: the device of each column
        modules: all modules in each column
        m: the number of micro-batches
        mechanisms: the mechanisms of the pipeline
        random: makes the notes of random numbers, for a device and all modules on it
        ambient, ordered, in_program, listener: see `LayersColumn`
    """
    streams = mechanisms.streams
    computing = [streams.current(device) for device in devices]

    def route(a: int, c: int, load: str = "") -> Route | None:
        ends = partitions[a]._index, partitions[c]._index
        return Route.between(computing[a], computing[c], streams, ends, listener, load)

    routes = [route(j, j + 1) for j in range(len(partitions) - 1)]
    layout = SkipLayout(modules)
    ends = [end for of_column in layout.leaving for end in of_column]
    portals = {key: Portal(key, route(a, c, "skip ")) for key, a, c in ends}
    modules_on: dict[torch.device, list[nn.Module]] = {device: [] for device in devices}
    for device, owned in zip(devices, modules):
        modules_on[device] += owned
    states = {device: random(device, owned) for device, owned in modules_on.items()}
    return [
        LayersColumn(
            j,
            partition,
            modules[j],
            computing[j],
            m,
            arriving=routes[j - 1] if j > 0 else None,
            leaving=routes[j] if j < len(routes) else None,
            sending=[portals[key] for key, _, _ in layout.leaving[j]],
            receiving=[portals[key] for key, _, _ in layout.arriving[j]],
            ambient=ambient,
            random=states[devices[j]],
            ordered=ordered,
            in_program=in_program,
            listener=listener,
            lock=mechanisms.lock,
        )
        for j, partition in enumerate(partitions)
    ]
