"""One micro-batch on one partition: all that happens to it there, in this order.

    copy in ──► compute ──► wait ──► tie
                   └─ twice, if it is checkpointed

A cell does not know who schedules it, and keeps no tensor. What it shares with the other cells of its partition
during a call is its `Stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.backward_pass import current_pass
from torchgpipe.devices.stream import Stream
from torchgpipe.devices.typing import Leaves
from torchgpipe.engine.checkpoint import Checkpoint, Keep, Recomputation, Recompute, Site
from torchgpipe.engine.copy import Route, copy, wait
from torchgpipe.engine.dependency import fork, join
from torchgpipe.engine.gradients import ParameterGradients
from torchgpipe.engine.portal import Portal
from torchgpipe.model.microbatch import Batch, Skips
from torchgpipe.model.partition import Partition
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.replay.statistics import STATISTICS, Norm, exclusive, scratch_statistics
from torchgpipe.skip.layout import is_skippable
from torchgpipe.skip.tracker import SkipTracker

__all__ = ["Cell", "Lane", "Stage", "tie"]

#: The phony that ties the next micro-batch on a partition to the one before it; None before the first.
Lane = Tensor | None


class Stage(Site):
    """A partition during one call: what its cells have in common.

    Args:
        j: the index of the partition
        partition: its layers
        modules: all modules in it
        stream: where it computes
        arriving: the way its inputs come, None if they are where it is
        leaving: the way its outputs go, None if they stay where they are
        ambient: what the caller has set
        sending: the portals of skips that its layers stash for later partitions
        receiving: the portals of skips that its layers pop and earlier partitions have stashed
        random: notes what is drawn on its device
        ordered: whether the cells have to be tied to each other, because several threads run them
        replicated: whether DistributedDataParallel is around the call
    """

    def __init__(
        self,
        j: int,
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
    ) -> None:
        self.j = j
        self.partition = partition
        self.device = stream.device
        self.stream = stream
        self.arriving = arriving
        self.leaving = [] if leaving is None else [leaving]
        self.leaving += [portal.route for portal in sending if portal.route is not None]
        self.sending = sending
        self.receiving = receiving
        self.ambient = ambient
        self.random = random
        self.phony = stream.device if ordered else None
        self._replicated = replicated

        names = list(partition._modules)
        self.where = f"partition {j} (layers '{names[0]}'..'{names[-1]}') on {self.device}"
        self.source = f"the output of layer '{names[-1]}' ({type(partition[-1]).__name__})"
        # Looked up anew for each call, because layers and parameters can be replaced between calls.
        # Not the partition, a view, which takes over the mode of the model when that is called.
        layers = [module for module in modules if module is not partition]
        self._layers = [(module, module.training, list(module._parameters.items())) for module in layers]
        self.norms = [module for module, training, _ in self._layers if training and isinstance(module, Norm)]
        self._buffers = [
            (module, name)
            for module in modules
            if module._buffers
            for name, _ in module._buffers.items()
            if not (isinstance(module, Norm) and name in STATISTICS)
        ]
        has_skips = any(is_skippable(module) for module in modules)
        # A dict, because a parameter can have several owners.
        parameters = {parameter: None for _, _, own in self._layers for _, parameter in own if parameter is not None}
        # Those of a lazy layer cannot even be asked. They are not checkpointed.
        self._versioned = [one for one in parameters if not (is_lazy(one) or one.is_inference())]
        self.parameters = tuple([parameter for parameter in parameters if parameter.requires_grad])
        self._frozen = tuple([parameter for parameter in parameters if not parameter.requires_grad])

        #: From the input of a cell to its output. Skips that arrive are behind the input's leaves, and those that leave
        #: are behind the output's.
        self.call: Callable[[Batch], Batch] = partial(_call, partition, self.source)
        if has_skips:
            self.call = partial(_call_with_skips, self.call, sending, receiving)
        if self.norms:
            self.call = partial(_call_alone, self.call, self.norms)
        if _starts_in_place(partition):
            self.call = partial(_call_on_copies, self.call)
        # The backward pass in which the layers were found as they were at the call.
        self._unchanged_in: int | None = None
        self._trains = ambient.builds_graph and len(self.parameters) > 0

    def needs_grad(self, leaves: Leaves) -> bool:
        """Whether there is anything to differentiate in a cell with this input."""
        if self._trains or not self.ambient.builds_graph:
            return self._trains
        return _first_in_graph(leaves) is not None

    @cached_property
    def gradients(self) -> ParameterGradients:
        """Where the gradients of the parameters go; made by the first cell that is a graph of its own."""
        return ParameterGradients(self.parameters, self._frozen, self.device, replicated=self._replicated)

    def again(self) -> AbstractContextManager[None]:
        """A recomputation runs on this stage's stream, and has no effect on its layers."""
        return self._again() if self.norms or self._buffers else self.stream.use()

    def versions(self) -> list[int]:
        return [parameter._version for parameter in self._versioned]

    def changed(self) -> str | None:
        if self._unchanged_in == current_pass():
            return None
        for module, training, own in self._layers:
            if module.training != training:
                return f"it was in {'training' if training else 'evaluation'} mode"
            for name, parameter in own:
                if _registered(module._parameters, name) is not parameter:
                    return f"'{name}' of a {type(module).__name__} was another parameter"
        self._unchanged_in = current_pass()
        return None

    @contextmanager
    def _again(self) -> Iterator[None]:
        with self.stream.use(), exclusive(self.norms), scratch_statistics(self.norms):
            before = self._buffer_versions()
            yield
            after = self._buffer_versions()
        for (module, name), (old, old_version), (new, new_version) in zip(self._buffers, before, after):
            if old is not new or old_version != new_version:
                raise RuntimeError(
                    f"recomputation has changed the buffer '{name}' of a {type(module).__name__} once more, so it does "
                    "not compute what the first run did; change it only if not is_recomputing(), or use "
                    "checkpoint='never'"
                )

    def _buffer_versions(self) -> list[tuple[Tensor | None, int]]:
        buffers = [_registered(module._buffers, name) for module, name in self._buffers]
        # With the buffers themselves: of one that is gone, another may have the id.
        return [(buffer, 0 if buffer is None or buffer.is_inference() else buffer._version) for buffer in buffers]


def _registered(tensors: Any, name: str) -> Tensor | None:
    """A parameter or buffer of a module, if it is there. What modules of TorchScript keep theirs in has no ``get``."""
    if name not in tensors:
        return None
    found: Tensor | None = tensors[name]
    return found


def _call(partition: Partition, source: str, batch: Batch) -> Batch:
    return batch.of(batch.pass_to(partition), source)  # of the kind that has come in


def _call_with_skips(
    call: Callable[[Batch], Batch], sending: Sequence[Portal], receiving: Sequence[Portal], batch: Batch
) -> Batch:
    width = len(batch.leaves) - len(receiving)
    tracker = SkipTracker(zip([portal.key for portal in receiving], batch.leaves[width:]))
    # A skip that is popped goes with the layer that pops it, and not with the cell.
    batch.leaves = batch.leaves[:width]
    with tracker:
        output = call(batch)
    return output.replace(output.leaves + tracker.take([portal.key for portal in sending]))


def _call_alone(call: Callable[[Batch], Batch], norms: Sequence[nn.Module], batch: Batch) -> Batch:
    with exclusive(norms):
        return call(batch)


def _call_on_copies(call: Callable[[Batch], Batch], batch: Batch) -> Batch:
    # Neither the user's mini-batch nor what a recomputation starts from may change.
    batch.leaves = tuple([None if leaf is None else leaf.clone() for leaf in batch.leaves])
    return call(batch)


def _starts_in_place(layer: nn.Module) -> bool:
    while isinstance(layer, nn.Sequential) and len(layer) > 0:
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))


class Cell(Recomputation):
    """Micro-batch ``i`` of ``m`` on the partition of ``stage``.

    Args:
        checkpoint: whether to keep the input only, and to compute again at backward
        keep: whether the graph of a cell that is not checkpointed is one of its own, beside checkpointed cells
    """

    __slots__ = ("_checkpoint", "_i", "_input", "_keep", "_m", "_output", "_stage")

    def __init__(self, stage: Stage, i: int, m: int, checkpoint: bool, keep: bool = False) -> None:
        # All that the base class does, without the call: there is a cell for every micro-batch and partition.
        self.site = self._stage = stage
        self._graph = None
        self._i = i
        self._m = m
        self._checkpoint = checkpoint
        self._keep = keep

    def run(self, batch: Batch, lane: Lane) -> tuple[Batch, Lane]:
        """From the output of the partition before to the output of this one.

        Args:
            batch: the output of the partition before, on its device
            lane: comes from the cell (i-1, j), if the stage is ordered
        """
        stage = self._stage
        try:
            skips = batch.skips
            if stage.arriving is not None:
                batch = batch.replace(copy(stage.arriving, self._i, batch.leaves))
            if skips and stage.receiving:
                batch = _receive(stage.receiving, self._i, batch, skips)
            if (self._checkpoint or self._keep) and stage.needs_grad(batch.leaves):
                run = self._run_checkpointed if self._checkpoint else self._run_kept
            else:
                run = self._run_plain
            batch, lane = run(batch, lane)
            if stage.sending:
                skips = {} if skips is None else skips
                batch = _send(stage.sending, batch, skips)
            batch.skips = skips
            return batch, lane
        except BaseException as error:
            self.failed(error, "forward")
            raise

    def failed(self, error: BaseException, phase: str) -> None:
        """Tells in a note where an error has happened."""
        note = f"micro-batch {self._i} of {self._m}, {self._stage.where}, during {phase}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def _run_plain(self, batch: Batch, lane: Lane) -> tuple[Batch, Lane]:
        stage = self._stage
        stage.random.forget()
        if lane is not None and tie(batch, [lane]):
            lane = None
        output = self.call(batch)
        if lane is not None and tie(output, [lane]):
            # No input required grad. The output does nearly as well: the engine takes this cell's nodes before
            # those of the cell before it, which the same thread has created earlier.
            lane = None
        if stage.leaving:
            output = output.replace(wait(stage.leaving, self._i, output.leaves))
        if stage.phony is not None and lane is None and self._i < self._m - 1:
            output, lane = _branch(output)
        return output, lane

    def _run_checkpointed(self, batch: Batch, lane: Lane) -> tuple[Batch, Lane]:
        stage = self._stage
        self._input = batch.replace(())
        leaves: Leaves = Checkpoint.apply(self, lane, stage.gradients.phony, *batch.leaves)
        node: Any = None if stage.phony is None else leaves[0].grad_fn  # type: ignore[union-attr]
        if stage.leaving:
            leaves = wait(stage.leaving, self._i, leaves)
        if node is None:
            return self._output.replace(leaves), None
        tied: Lane = Recompute.apply(node, leaves[0])
        return self._output.replace(leaves[1:]), tied

    def _run_kept(self, batch: Batch, lane: Lane) -> tuple[Batch, Lane]:
        stage = self._stage
        stage.random.forget()
        self._input = batch.replace(())
        leaves: Leaves = Keep.apply(self, lane, stage.gradients.phony, *batch.leaves)
        if _first_in_graph(leaves) is not None:
            lane = None
        if stage.leaving:
            leaves = wait(stage.leaving, self._i, leaves)
        return self._output.replace(leaves), lane

    def call(self, batch: Batch) -> Batch:
        """The layers, in a cell that is not checkpointed."""
        return self._stage.call(batch)

    def compute(self, leaves: Leaves) -> Leaves:
        output = self._stage.call(self._input.replace(leaves))
        leaves = output.leaves
        output.leaves = ()  # The structure is needed again, for what autograd makes of the leaves.
        self._output = output
        return leaves


def _receive(portals: Sequence[Portal], i: int, batch: Batch, skips: Skips) -> Batch:
    """Brings the skips that are popped here, and puts them behind the other leaves."""
    arrived = tuple([portal.receive(i, skips.pop(portal.key)) for portal in portals])
    return batch.replace(batch.leaves + arrived)


def _send(portals: Sequence[Portal], batch: Batch, skips: Skips) -> Batch:
    """Takes the skips that were stashed here, which are behind the other leaves, on their way."""
    width = len(batch.leaves) - len(portals)
    skips.update(zip([portal.key for portal in portals], batch.leaves[width:]))
    return batch.replace(batch.leaves[:width])


def _first_in_graph(leaves: Leaves) -> int | None:
    for k, leaf in enumerate(leaves):
        if leaf is not None and leaf.requires_grad:
            return k
    return None


def _replace_leaf(leaves: Leaves, k: int, leaf: Tensor) -> Leaves:
    return (*leaves[:k], leaf, *leaves[k + 1 :])


def tie(batch: Batch, lanes: Sequence[Tensor]) -> bool:
    """Ends lanes in a batch, so that their other ends are differentiated after it.

    False if nothing in the batch requires grad.
    """
    for k, leaf in enumerate(batch.leaves):
        if leaf is not None and leaf.requires_grad:
            batch.leaves = _replace_leaf(batch.leaves, k, join(leaf, *lanes))
            return True
    return False


def _branch(batch: Batch) -> tuple[Batch, Lane]:
    """Begins a lane at all of a batch, or a part might be differentiated early; None if nothing requires grad."""
    graph = {k: leaf for k, leaf in enumerate(batch.leaves) if leaf is not None and leaf.requires_grad}
    if not graph:
        return batch, None
    *forked, lane = fork(*graph.values())
    there = dict(zip(graph, forked))
    return batch.replace(tuple([there.get(k, leaf) for k, leaf in enumerate(batch.leaves)])), lane
