"""Running the cells: in the caller's thread where there is one device, in a worker for each where there are several.

For the host, a cell has finished when its kernels are launched; that keeps the devices busy at the same time. Backward
needs no schedule of its own: the nodes that the cells leave in the autograd graph make the engine take the cells in the
reverse order.

Where one thread creates all nodes, their sequence numbers alone give that order. The sequence numbers of different
threads say nothing about each other, so there the cells of each partition are tied together by a lane of phonies:

    Checkpoint(0,j) ──► Recompute(0,j) ──► Checkpoint(1,j) ──► Recompute(1,j) ──► ... ──► Join on the output
    cell (0,j) ──► Fork ─────────────────► Join ──► cell (1,j) ──► Fork ──► ...       not checkpointed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from torchgpipe.devices.stream import Stream, Streams
from torchgpipe.devices.torch_internals import transforms_are_active
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.copy import Route
from torchgpipe.engine.function import refuse_transforms
from torchgpipe.engine.label import labelled
from torchgpipe.engine.partition_call import PartitionCall
from torchgpipe.engine.passage import Lane, Mode, pass_through, tie
from torchgpipe.engine.portal import Portal
from torchgpipe.engine.record import Place, Recorder, Step
from torchgpipe.engine.workers import Task, run_in_workers
from torchgpipe.model.data_parallel import is_replicated
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates, sharing_generator
from torchgpipe.schedule import clock_cycles
from torchgpipe.skip.layout import inspect_skip_layout

__all__ = ["Mechanisms", "Pipeline"]


@dataclass(frozen=True)
class Mechanisms:
    """The mechanisms of a pipeline beside its schedule. A test or a benchmark can exchange each of them.

    Attributes:
        streams: the source of streams
        dependency: whether to fix the order of micro-batches at backward
        recorder: the listener to what runs when, if there is one
    """

    streams: Streams = field(default_factory=Streams)
    dependency: bool = True
    recorder: Recorder | None = None


class Pipeline:
    """The cells of one call.

    Args:
        partitions: the layers, on their devices
        devices: the device of each partition
        m: the number of micro-batches
        mechanisms: the mechanisms of the pipeline
    """

    def __init__(
        self, partitions: Sequence[Partition], devices: Sequence[torch.device], m: int, mechanisms: Mechanisms
    ) -> None:
        self._m = m
        self._ambient = Ambient()
        self._inline = len(set(devices)) == 1
        self._in_turn = sharing_generator(devices)
        streams = mechanisms.streams
        computing = [streams.current(device) for device in devices]
        self._step = _begin_step(m, partitions, computing, mechanisms.recorder)

        def route(a: int, c: int, load: str = "") -> Route | None:
            return _route(streams, computing, (a, c), load, self._step)

        routes = [route(j, j + 1) for j in range(len(partitions) - 1)]

        # Looked up at every call, because layers can be replaced between two calls.
        modules = [list(partition.modules()) for partition in partitions]
        skips = inspect_skip_layout(modules)
        portals = {key: Portal(key, route(a, c, "skip ")) for ends in skips.leaving for key, a, c in ends}
        there: dict[torch.device, list[nn.Module]] = {device: [] for device in devices}
        for device, own in zip(devices, modules):
            there[device] += own
        random = {
            device: RandomStates(device, own, beside=device not in self._in_turn, between=not self._inline)
            for device, own in there.items()
        }
        self._calls = [
            PartitionCall(
                j,
                partition,
                modules[j],
                computing[j],
                arriving=routes[j - 1] if j > 0 else None,
                leaving=routes[j] if j < len(routes) else None,
                sending=[portals[key] for key, _, _ in skips.leaving[j]],
                receiving=[portals[key] for key, _, _ in skips.arriving[j]],
                ambient=self._ambient,
                random=random[devices[j]],
                ordered=mechanisms.dependency and not self._inline and self._ambient.builds_graph,
                replicated=is_replicated(),
                step=self._step,
            )
            for j, partition in enumerate(partitions)
        ]

    def run(self, batches: list[Batch], checkpoint_stop: int) -> None:
        """Replace every micro-batch by the output of the last partition.

        Args:
            batches: micro-batches on the first device
            checkpoint_stop: how many of them are checkpointed
        """
        if checkpoint_stop > 0 or not self._inline:
            refuse_transforms()
        if self._inline:
            with self._calls[0].stream.use():
                self._run_inline(batches, checkpoint_stop)
        else:
            self._run_in_workers(batches, checkpoint_stop)

    def _run_inline(self, batches: list[Batch], checkpoint_stop: int) -> None:
        for cells in clock_cycles(self._m, len(self._calls)):
            for i, j in cells:
                cell = Cell(self._calls[j], i, self._m)
                batches[i], _ = pass_through(cell, batches[i], None, self._mode(i, checkpoint_stop))
        self._calls[0].random.forget()  # The last state takes kilobytes.

    def _run_in_workers(self, batches: list[Batch], checkpoint_stop: int) -> None:
        cells = list(chain.from_iterable(clock_cycles(self._m, len(self._calls))))
        lanes: list[Lane] = [None] * len(self._calls)

        def run(number: int) -> None:
            i, j = cells[number]
            cell = Cell(self._calls[j], i, self._m)
            batches[i], lanes[j] = pass_through(cell, batches[i], lanes[j], self._mode(i, checkpoint_stop))

        run_in_workers(self._tasks(cells), run, self._ambient)
        # Recomputation of the last micro-batch can start on every device when backward starts.
        open_lanes = [lane for lane in lanes if lane is not None]
        if open_lanes:
            tie(batches[-1], open_lanes)

    def _tasks(self, cells: Sequence[tuple[int, int]]) -> list[Task]:
        """Return the cells as tasks. Those that share a random number generator need each other, in their order."""
        numbers: dict[tuple[int, int], int] = {}
        tasks: list[Task] = []
        turn: int | None = None  # the last cell that ran in turn
        for number, (i, j) in enumerate(cells):
            numbers[i, j] = number
            needs = [] if j == 0 else [numbers[i, j - 1]]
            stream = self._calls[j].stream
            if stream.device in self._in_turn:
                # The cell (i, j-1) is the one before it in turn, or comes before that: one wait is enough.
                needs = [need for need in needs if tasks[need].stream.device not in self._in_turn]
                needs += [] if turn is None else [turn]
                turn = number
            tasks.append(Task(stream, needs))
        return tasks

    def _mode(self, i: int, checkpoint_stop: int) -> Mode:
        """Return how the cells of micro-batch ``i`` run."""
        if i < checkpoint_stop:
            return "checkpoint"
        # A transform of torch.func has an autograd of its own, which knows no graphs inside of graphs.
        is_recorded = self._step is not None and not transforms_are_active()
        return "keep" if checkpoint_stop > 0 or is_recorded else "plain"


def _begin_step(
    m: int, partitions: Sequence[Partition], computing: Sequence[Stream], recorder: Recorder | None
) -> Step | None:
    if recorder is None:
        return labelled(None)
    places = [Place(stream, list(partition._modules)) for stream, partition in zip(computing, partitions)]
    return labelled(recorder.begin_step(m, places))


def _route(
    streams: Streams, computing: Sequence[Stream], ends: tuple[int, int], load: str, step: Step | None
) -> Route | None:
    source, target = (computing[j] for j in ends)
    if not streams.moves(source.device, target.device):
        return None
    leaving = streams.side(source.device, f"{load}leaving")
    arriving = streams.side(target.device, f"{load}arriving")
    return Route(source, leaving, arriving, target, ends, step)
