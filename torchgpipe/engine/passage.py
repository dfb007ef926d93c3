"""The passage of a micro-batch through a cell, as part of the caller's autograd graph.

    copy in ──► compute ──► wait ──► tie
                   └─ twice, if the cell is checkpointed

Backward goes the same way from right to left, driven by autograd's engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from torchgpipe.devices.typing import Leaves
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.checkpoint import Checkpoint, Keep, Recompute
from torchgpipe.engine.copy import copy, wait
from torchgpipe.engine.dependency import fork, join
from torchgpipe.engine.kept import KeptGraph
from torchgpipe.engine.portal import Portal
from torchgpipe.engine.recomputation import Recomputation
from torchgpipe.model.microbatch import Batch, Skips

__all__ = ["Lane", "Mode", "pass_through", "tie"]

#: The phony that ties the next micro-batch on a partition to the one before it; None before the first micro-batch.
Lane = Tensor | None

#: How a cell runs: it keeps its input only; it keeps a graph of its own; or it is a plain part of the caller's graph.
Mode = Literal["checkpoint", "keep", "plain"]


def pass_through(cell: Cell, batch: Batch, lane: Lane, mode: Mode) -> tuple[Batch, Lane]:
    """Take a micro-batch from the output of the partition before to the output of this one.

    Args:
        cell: micro-batch i on partition j
        batch: the output of partition j-1, on its device
        lane: the lane that the cell (i-1, j) has left
        mode: how the cell runs, if it has anything to differentiate

    Returns:
        the output, on the device of partition j, and the lane for the cell (i+1, j)

    Raises:
        Exception: what a layer raises, with a note of the cell.
    """
    call = cell.call
    try:
        skips = batch.skips
        if call.arriving is not None:
            batch = batch.replace(copy(call.arriving, cell.i, batch.leaves))
        if skips and call.receiving:
            batch = _receive(call.receiving, cell.i, batch, skips)
        run = _MODES[mode] if call.needs_grad(batch.leaves) else _pass_plain
        batch, lane = run(cell, batch, lane)
        if call.sending:
            skips = {} if skips is None else skips
            batch = _send(call.sending, batch, skips)
        batch.skips = skips
        return batch, lane
    except BaseException as error:
        cell.failed(error, "forward")
        raise


def _pass_plain(cell: Cell, batch: Batch, lane: Lane) -> tuple[Batch, Lane]:
    call = cell.call
    call.random.forget()
    if lane is not None and tie(batch, [lane]):
        lane = None
    with cell.recorded("forward"), call.layers.exclusively():
        output = call.run_layers(batch)
    if lane is not None and tie(output, [lane]):
        # No input required grad. The output does nearly as well: the engine takes this cell's nodes before
        # those of the cell before it, which the same thread has created earlier.
        lane = None
    if call.leaving:
        output = output.replace(wait(call.leaving, cell.i, output.leaves))
    if call.lane_device is not None and lane is None and cell.i < cell.m - 1:
        output, lane = _branch(output)
    return output, lane


def _pass_checkpointed(cell: Cell, batch: Batch, lane: Lane) -> tuple[Batch, Lane]:
    call = cell.call
    cell.begin(batch)
    leaves: Leaves = Checkpoint.apply(Recomputation(cell), lane, call.gradients.phony, *batch.leaves)
    node: Any = None if call.lane_device is None else leaves[0].grad_fn  # type: ignore[union-attr]
    if call.leaving:
        leaves = wait(call.leaving, cell.i, leaves)
    if node is None:
        return cell.end(leaves), None
    tied: Lane = Recompute.apply(node, leaves[0])
    return cell.end(leaves[1:]), tied


def _pass_kept(cell: Cell, batch: Batch, lane: Lane) -> tuple[Batch, Lane]:
    call = cell.call
    call.random.forget()
    cell.begin(batch)
    leaves: Leaves = Keep.apply(KeptGraph(cell), lane, call.gradients.phony, *batch.leaves)
    output = cell.end(leaves)
    if any([leaf is not None and leaf.requires_grad for leaf in leaves]):
        lane = None
    if call.leaving:
        output = output.replace(wait(call.leaving, cell.i, leaves))
    if call.lane_device is not None and lane is None and cell.i < cell.m - 1:
        output, lane = _branch(output)
    return output, lane


_MODES = {"checkpoint": _pass_checkpointed, "keep": _pass_kept, "plain": _pass_plain}


def _receive(portals: Sequence[Portal], i: int, batch: Batch, skips: Skips) -> Batch:
    """Bring the skips that are popped here to this device, and put them behind the other leaves."""
    arrived = tuple([portal.receive(i, skips.pop(portal.key)) for portal in portals])
    return batch.replace(batch.leaves + arrived)


def _send(portals: Sequence[Portal], batch: Batch, skips: Skips) -> Batch:
    """Take the skips that were stashed here, which are behind the other leaves, on their way."""
    width = len(batch.leaves) - len(portals)
    skips.update(zip([portal.key for portal in portals], batch.leaves[width:]))
    return batch.replace(batch.leaves[:width])


def tie(batch: Batch, lanes: Sequence[Tensor]) -> bool:
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
