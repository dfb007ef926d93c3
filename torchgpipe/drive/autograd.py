"""The forward half of a mini-batch whose backward autograd drives: its cells, as parts of the caller's graph.

    copy in ──► layers ──► wait ──► tie         a micro-batch on its way through a cell
                  └─ twice, if the cell is recomputed

The executor runs the cells in clock cycles, as it runs any program. For the host, a cell has finished when its kernels
are launched; that keeps the devices busy at the same time. Backward needs no schedule of its own: the nodes that the
cells leave make the engine take the cells in the reverse order.

Where one thread creates all nodes, their sequence numbers alone give that order. The sequence numbers of different
threads say nothing about each other, so there the cells of each partition are tied together by a lane of phonies:

    CellNode(0,j) ──► Recompute(0,j) ──► CellNode(1,j) ──► Recompute(1,j) ──► ... ──► Join on the output
    cell (0,j) ──► Fork ──► Join ──► cell (1,j) ──► Fork ──► ...       without a graph of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from torchgpipe.batch.microbatch import Batch, Skips, set_apart
from torchgpipe.cell.layers_cell import LayersCell
from torchgpipe.cell.layers_column import LayersColumn, Mechanisms, begin_step, make_columns
from torchgpipe.cell.out_of_memory import facts_of
from torchgpipe.cell.views import views_of_each
from torchgpipe.devices.torch_internals import transforms_are_active
from torchgpipe.devices.typing import Leaves
from torchgpipe.drive.agenda import Agenda
from torchgpipe.drive.executor import Executor
from torchgpipe.drive.nodes import CellNode, Recompute
from torchgpipe.graph.dependency import fork, join
from torchgpipe.graph.function import refuse_transforms
from torchgpipe.model.partition import Partition
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.callers_generator import CallersGenerator
from torchgpipe.replay.random import RandomStates
from torchgpipe.schedule import Action, clock_cycles
from torchgpipe.transport.portal import Portal
from torchgpipe.transport.route import copy, wait

__all__ = ["ForwardPass", "Mode", "pass_through"]

#: The phony that ties the next micro-batch in a column to the one before it; None before the first micro-batch.
Lane: TypeAlias = Tensor | None

#: How a cell runs: it is a plain part of the caller's graph; or it keeps a graph of its own; or it runs twice.
Mode = Literal["plain", "keep", "checkpoint"]


class ForwardPass:
    """The cells of one call, as the front of the executor; each leaves nodes in the caller's graph.

    Args:
        partitions: the layers, on their devices; a partition may be divided into several views
        devices: the device of each view
        batches: the micro-batches, on the first device
        checkpointed: for each view, how many micro-batches, from the first on, are checkpointed
        mechanisms: the mechanisms of the pipeline

    Attributes:
        columns: the columns, one for each view
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        devices: Sequence[torch.device],
        batches: list[Batch],
        checkpointed: Sequence[int],
        mechanisms: Mechanisms,
    ) -> None:
        self._batches, self._checkpointed = batches, checkpointed
        self._ambient = Ambient()
        self._in_one_thread, several = in_one_thread(devices), len(set(devices)) > 1
        self._listener = begin_step(len(batches), partitions, devices, mechanisms)
        self.columns = make_columns(
            partitions,
            devices,
            [list(partition.modules()) for partition in partitions],
            len(batches),
            mechanisms,
            lambda device, modules: RandomStates(device, modules, between=several),
            ambient=self._ambient,
            ordered=mechanisms.dependency and not self._in_one_thread and self._ambient.builds_graph,
            listener=self._listener,
        )
        if not checkpointed[0]:  # What runs again must not change its input, and must know whether the caller has.
            set_apart(batches)
        self._lanes: list[Lane] = [None] * len(self.columns)
        # A transform of torch.func has an autograd of its own, which knows no graphs inside of graphs.
        is_recorded = self._listener is not None and not transforms_are_active()
        #: How cells run that are not checkpointed.
        self._else: Mode = "keep" if any(checkpointed) or is_recorded else "plain"
        facts = facts_of(None, partitions, checkpointed, backward=self._ambient.builds_graph)
        for column in self.columns:
            column.facts = facts
        views = views_of_each(partitions)
        #: The views of a partition run one after the other, as the whole partition would.
        cycles = clock_cycles(len(batches), len(views))
        self._actions = [Action("F", i, view) for clock in cycles for i, j in clock for view in views[j]]

    def run(self) -> None:
        """Replace every micro-batch by the output of the last partition."""
        if any(self._checkpointed) or not self._in_one_thread:
            refuse_transforms()
        accelerators = {column.stream.device for column in self.columns if column.stream.device.type != "cpu"}
        # Autograd has a thread for each of them, but one thread for all devices of the CPU.
        generator = CallersGenerator() if len(accelerators) > 1 and self._ambient.builds_graph else None
        agenda = Agenda(self._actions, [] if self._in_one_thread else self._needs())
        Executor(self, self._ambient, in_one_thread=self._in_one_thread).run(agenda)
        self.columns[0].random.forget()  # The last state takes kilobytes.
        # Recomputation of the last micro-batch can start on every device when backward starts.
        open_lanes = [lane for lane in self._lanes if lane is not None]
        if open_lanes:
            _tie(self._batches[-1], open_lanes)
        if generator is not None:
            generator.watch([leaf for batch in self._batches for leaf in batch.leaves])

    def _needs(self) -> list[list[int]]:
        """Return what each action needs, for workers: the cell whose output it takes."""
        numbers = {action: number for number, action in enumerate(self._actions)}
        return [[numbers[Action("F", i, j - 1)]] if j else [] for _, i, j in self._actions]

    # ------------------------------------------------------------------------------- what the executor asks of a front

    def forward(self, i: int, j: int, *, recomputes: bool) -> None:
        """See `Front.forward`."""
        mode: Mode = "checkpoint" if i < self._checkpointed[j] else self._else
        self._batches[i], self._lanes[j] = pass_through(self.columns[j], i, self._batches[i], self._lanes[j], mode)

    def cancel(self) -> None:
        """See `Front.cancel`."""


def in_one_thread(devices: Sequence[torch.device]) -> bool:
    """Return whether one thread runs all cells: of one device, or of several of the CPU, which share a generator."""
    return len(set(devices)) == 1 or len({device for device in devices if device.type == "cpu"}) > 1


def pass_through(column: LayersColumn, i: int, batch: Batch, lane: Lane, mode: Mode) -> tuple[Batch, Lane]:
    """Take a micro-batch from the output of the partition before to the output of this one.

    Args:
        column: column j
        i: the micro-batch
        batch: the output of column j-1, on its device
        lane: the lane that the cell (i-1, j) has left
        mode: how the cell runs, if it has anything to differentiate

    Returns:
        the output, on the device of column j, and the lane for the cell (i+1, j)

    Raises:
        Exception: what a layer raises, with a note of the cell.
    """
    try:
        skips = batch.skips
        if column.arriving is not None:
            batch = batch.replace(copy(column.arriving, i, batch.leaves))
        if skips and column.receiving:
            batch = _receive(column.receiving, i, batch, skips)
        if mode != "plain" and column.needs_grad(batch.leaves):
            batch, lane = _pass_with_node(column, i, batch, lane, recomputes=mode == "checkpoint")
        else:
            batch, lane = _pass_plain(column, i, batch, lane)
        if column.sending:
            skips = {} if skips is None else skips
            batch = _send(column.sending, batch, skips)
        batch.skips = skips
        return batch, lane
    except BaseException as error:
        column.note(error, i, "forward")
        raise


def _pass_plain(column: LayersColumn, i: int, batch: Batch, lane: Lane) -> tuple[Batch, Lane]:
    """Let a cell be a part of the caller's graph, or of no graph."""
    column.random.forget()
    if lane is not None and _tie(batch, [lane]):
        lane = None
    with column.recorded("forward", i), column.layers.exclusively():
        output = column.run_layers(batch)
    if lane is not None and _tie(output, [lane]):
        # No input required grad. The output does nearly as well: the engine takes this cell's nodes before
        # those of the cell before it, which the same thread has created earlier.
        lane = None
    if column.leaving:
        output = output.replace(wait(column.leaving, i, output.leaves))
    if column.lane_device is not None and lane is None and i < column.m - 1:
        output, lane = _branch(output)
    return output, lane


def _pass_with_node(column: LayersColumn, i: int, batch: Batch, lane: Lane, *, recomputes: bool) -> tuple[Batch, Lane]:
    """Let a cell be a node of the caller's graph."""
    if not recomputes:
        column.random.forget()
    cell = LayersCell(i, column)
    cell.begin(batch)
    leaves: Leaves = CellNode.apply(cell, recomputes, lane, column.gradients.phony, *batch.leaves)
    phony = None
    if column.lane_device is not None:
        phony, *rest = leaves
        leaves = tuple(rest)
    node: Any = None if phony is None else phony.grad_fn
    if column.leaving:
        leaves = wait(column.leaving, i, leaves)
    if phony is not None and recomputes:
        phony = Recompute.apply(node, phony)
    elif i == column.m - 1:
        phony = None  # Nothing of this device is differentiated before it.
    return cell.end(leaves), phony


def _receive(portals: Sequence[Portal], i: int, batch: Batch, skips: Skips) -> Batch:
    """Bring the skips that are popped here to this device, and put them behind the other leaves."""
    arrived = tuple([portal.receive(i, skips.pop(portal.key)) for portal in portals])
    return batch.replace(batch.leaves + arrived)


def _send(portals: Sequence[Portal], batch: Batch, skips: Skips) -> Batch:
    """Take the skips that were stashed here, which are behind the other leaves, on their way."""
    width = len(batch.leaves) - len(portals)
    skips.update(zip([portal.key for portal in portals], batch.leaves[width:]))
    return batch.replace(batch.leaves[:width])


def _tie(batch: Batch, lanes: Sequence[Tensor]) -> bool:
    """End lanes in a batch, so that the other ends of the lanes are differentiated after it.

    Returns:
        False if nothing in the batch requires grad
    """
    for k, leaf in enumerate(batch.leaves):
        if leaf is not None and leaf.requires_grad:
            batch.leaves = (*batch.leaves[:k], join(leaf, *lanes), *batch.leaves[k + 1 :])
            return True
    return False


def _branch(batch: Batch) -> tuple[Batch, Lane]:
    """Begin a lane at all leaves of a batch; None if nothing requires grad.

    At all of them, or the engine might differentiate a part of the cell too early.
    """
    graph = {k: leaf for k, leaf in enumerate(batch.leaves) if leaf is not None and leaf.requires_grad}
    if not graph:
        return batch, None
    *forked, lane = fork(*graph.values())
    replaced = dict(zip(graph, forked))
    return batch.replace(tuple([replaced.get(k, leaf) for k, leaf in enumerate(batch.leaves)])), lane
