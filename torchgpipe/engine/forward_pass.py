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

import torch

from torchgpipe.devices.torch_internals import transforms_are_active
from torchgpipe.engine.calls import Mechanisms, begin_step, make_calls
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.copy import release
from torchgpipe.engine.function import refuse_transforms
from torchgpipe.engine.out_of_memory import facts_of
from torchgpipe.engine.passage import Lane, Mode, pass_through, tie
from torchgpipe.engine.workers import Task, run_in_workers
from torchgpipe.model.data_parallel import is_replicated
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition
from torchgpipe.model.views import views_of_each
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.callers_generator import CallersGenerator
from torchgpipe.replay.random import RandomStates, sharing_generator
from torchgpipe.schedule import clock_cycles

__all__ = ["ForwardPass"]


class ForwardPass:
    """The cells of one call, which leave a graph for autograd.

    Args:
        partitions: the layers, on their devices; a partition may be divided into several views
        devices: the device of each view
        m: the number of micro-batches
        mechanisms: the mechanisms of the pipeline
    """

    def __init__(
        self, partitions: Sequence[Partition], devices: Sequence[torch.device], m: int, mechanisms: Mechanisms
    ) -> None:
        self._m = m
        self._partitions, self._devices = partitions, devices
        views = views_of_each(partitions)
        #: The views of a partition run one after the other, as the whole partition would.
        self._cells = [(i, view) for clock in clock_cycles(m, len(views)) for i, j in clock for view in views[j]]
        self._ambient = Ambient()
        self._inline = len(set(devices)) == 1
        self._in_turn = sharing_generator(devices)
        self._listener = begin_step(m, partitions, devices, mechanisms)
        self._calls = make_calls(
            partitions,
            devices,
            [list(partition.modules()) for partition in partitions],
            mechanisms,
            lambda device, modules: RandomStates(
                device, modules, beside=device not in self._in_turn, between=not self._inline
            ),
            ambient=self._ambient,
            ordered=mechanisms.dependency and not self._inline and self._ambient.builds_graph,
            replicated=is_replicated(),
            listener=self._listener,
        )

    def run(self, batches: list[Batch], checkpointed: Sequence[int]) -> None:
        """Replace every micro-batch by the output of the last partition.

        Args:
            batches: micro-batches on the first device
            checkpointed: for each view, how many micro-batches, from the first on, are checkpointed
        """
        self._checkpointed = checkpointed
        facts = facts_of(None, self._partitions, checkpointed, backward=self._ambient.builds_graph)
        for call in self._calls:
            call.facts = facts
        if any(checkpointed) or not self._inline:
            refuse_transforms()
        if self._inline:
            with self._calls[0].stream.use():
                self._run_inline(batches)
        else:
            self._run_in_workers(batches)

    def _run_inline(self, batches: list[Batch]) -> None:
        for i, j in self._cells:
            cell = Cell(self._calls[j], i, self._m)
            batches[i], _ = pass_through(cell, batches[i], None, self._mode(i, j))
        self._calls[0].random.forget()  # The last state takes kilobytes.

    def _run_in_workers(self, batches: list[Batch]) -> None:
        cells = self._cells
        lanes: list[Lane] = [None] * len(self._calls)

        def run(number: int) -> None:
            i, j = cells[number]
            cell = Cell(self._calls[j], i, self._m)
            batches[i], lanes[j] = pass_through(cell, batches[i], lanes[j], self._mode(i, j))

        accelerators = {device for device in self._devices if device.type != "cpu"}
        # Autograd has a thread for each of them, but one thread for all devices of the CPU.
        generator = CallersGenerator() if len(accelerators) > 1 and self._ambient.builds_graph else None
        try:
            run_in_workers(self._tasks(cells), run, self._ambient)
        finally:
            release([route for call in self._calls for route in call.leaving])
        # Recomputation of the last micro-batch can start on every device when backward starts.
        open_lanes = [lane for lane in lanes if lane is not None]
        if open_lanes:
            tie(batches[-1], open_lanes)
        if generator is not None:
            generator.watch([leaf for batch in batches for leaf in batch.leaves])

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

    def _mode(self, i: int, j: int) -> Mode:
        """Return how micro-batch ``i`` runs on view ``j``."""
        if i < self._checkpointed[j]:
            return "checkpoint"
        # A transform of torch.func has an autograd of its own, which knows no graphs inside of graphs.
        is_recorded = self._listener is not None and not transforms_are_active()
        return "keep" if any(self._checkpointed) or is_recorded else "plain"
