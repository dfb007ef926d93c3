"""A step of a Sequential: its micro-batches, as the front of a program.

What travels from cell to cell is the leaves of a value, and skips; each with where its gradient arrives. In a program,
j is a partition. Here j is a view, which may be a part of a partition, or several partitions; see `agenda`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from torchgpipe.batch.microbatch import Batch, set_apart
from torchgpipe.cell.cell import Arrival, Export, Source
from torchgpipe.cell.layers_cell import LayersCell
from torchgpipe.cell.layers_column import LayersColumn, Mechanisms, begin_step, make_columns
from torchgpipe.cell.out_of_memory import facts_of
from torchgpipe.cell.views import Joined, joinable, views_of_each
from torchgpipe.devices.torch_internals import shares_memory, versions
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.drive.agenda import agenda_of
from torchgpipe.drive.executor import Executor
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.gradients.of_steps import with_gradients
from torchgpipe.graph.cut import CutGraph
from torchgpipe.graph.function import refuse_transforms
from torchgpipe.listener.listener import Listener
from torchgpipe.model.partition import Partition
from torchgpipe.offload.aliases import make_aliases
from torchgpipe.offload.host_copies import Half, Kept, resident, restored
from torchgpipe.offload.host_memory import HostMemory
from torchgpipe.offload.residence import residence_of
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.replay.random_numbers import RandomNumbers
from torchgpipe.schedule import Program, Schedule
from torchgpipe.skip.namespace import SkipKey
from torchgpipe.transport.route import Route, copy_forward, mark_ready

__all__ = ["run_step"]

#: Turns the output of micro-batch ``i`` into its share of the loss, of shape (1,).
Finish: TypeAlias = Callable[[int, Batch], Tensor]


def run_step(
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    inputs: list[Batch],
    program: Program,
    finish: Finish,
    mechanisms: Mechanisms,
    *,
    gather: Callable[[], Any],
    checkpointed: Sequence[int],
    backward: bool,
    schedule: Schedule,
    random_numbers: RandomNumbers,
    host_memory: HostMemory | None,
    watches: bool,
) -> Any:
    """Run a mini-batch, and add the gradients of its loss to ``.grad``.

    Args:
        partitions: the layers, on their devices; a partition may be divided into several views
        devices: the device of each view
        inputs: the micro-batches, on the first device
        program: a list of actions for each device, which can run, in terms of partitions
        finish: computes the loss of a micro-batch from its output
        mechanisms: the mechanisms of the pipeline
        gather: computes what to return, after the last cell
        checkpointed: for each view, how many micro-batches, from the first on, may be recomputed
        backward: whether to run backward
        schedule: what the program comes from, for errors
        random_numbers: the random numbers of the mini-batch
        host_memory: transfers weights to devices, if they live in host memory
        watches: whether to verify each operation on weights that live in host memory

    Raises:
        BaseException: the error of the first action that failed, with notes; ``.grad`` is as it was before.
    """
    lock = mechanisms.lock
    with lock.held(alone=True):
        refuse_transforms()
        listener = begin_step(len(inputs), partitions, devices, mechanisms)
        offloads = host_memory is not None
        # A listener hears of each partition.
        apart = listener is not None or offloads
        joins = (False,) * len(partitions) if apart else joinable(partitions, devices, checkpointed)
        views = tuple(map(tuple, views_of_each(partitions)))
        facts = facts_of(schedule, partitions, checkpointed, backward=backward)
        counts = tuple(checkpointed) if backward else ()
        agenda = agenda_of(tuple(map(tuple, program)), views, joins, counts, backward=backward)
        columns = agenda.columns
        joined = [
            Joined([partitions[k] for k in views]) if len(views) > 1 else partitions[views[0]] for views in columns
        ]
        devices = [devices[views[0]] for views in columns]
        modules = [list(partition.modules()) for partition in joined]
        slots = [
            (module, name, j)
            for j, modules_of_view in enumerate(modules if backward or offloads else [])
            for module in modules_of_view
            for name, _ in module._parameters.items()
        ]
        streams = mechanisms.streams if offloads else None
        aliases = make_aliases(slots, devices, streams, lock, host_memory, backward=backward)

        def work() -> Any:
            with aliases.installed():
                cells = MicroBatches(
                    joined,
                    devices,
                    modules,
                    inputs,
                    finish,
                    mechanisms,
                    backward,
                    listener,
                    aliases,
                    random_numbers,
                    watches,
                )
                with cells.ambient.fresh_casts():
                    executor = Executor(
                        cells, cells.ambient, facts, cells.residence, in_one_thread=random_numbers.are_of_the_process
                    )
                    executor.run(agenda)
                    cells.end()
                    return gather(), cells.entered()

        return with_gradients(aliases, work) if backward else work()[0]


class MicroBatches:
    """The cells of a step, and what travels between them. See `run_step` for the arguments.

    Attributes:
        ambient: the settings of the caller
        columns: the columns, one for each view, or for several that are joined
        residence: which tensors are on their devices
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        devices: Sequence[torch.device],
        modules: Sequence[list[nn.Module]],
        inputs: list[Batch],
        finish: Finish,
        mechanisms: Mechanisms,
        backward: bool,
        listener: Listener | None,
        aliases: Aliases,
        random_numbers: RandomNumbers,
        watches: bool,
    ) -> None:
        self._aliases = aliases
        self._m, self._n = len(inputs), len(partitions)
        self._finish, self._backward = finish, backward
        self.ambient = Ambient()
        self._random_numbers = random_numbers
        self._has_rows = any([leaf is not None and leaf.numel() > 0 for leaf in inputs[0].leaves])
        self._recomputed = False
        self.columns = make_columns(
            partitions,
            devices,
            modules,
            self._m,
            mechanisms,
            lambda device, owned: RandomStates(
                device, owned, between=True, generators=random_numbers.following(device)
            ),
            ambient=self.ambient,
            ordered=False,
            in_program=True,
            listener=listener,
        )
        streams, places = [column.stream for column in self.columns], [column.partition for column in self.columns]
        self.residence = residence_of(aliases, streams, places, listener, watches=watches)
        #: The inputs that require grad, with where their gradients arrive.
        self._inputs: list[tuple[Tensor, Arrival]] = []
        set_apart(inputs)
        self._values = {(i, 0): self._entering(batch) for i, batch in enumerate(inputs)}
        self._skips: dict[tuple[int, SkipKey], tuple[Kept, Source | None]] = {}
        #: Where each skip is popped.
        self._poppers = {portal.key: j for j, column in enumerate(self.columns) for portal in column.receiving}
        self._cells: dict[tuple[int, int], LayersCell] = {}
        #: The inputs of cells that run again, with their versions.
        self._inputs_of: dict[tuple[int, int], tuple[Sequence[Kept], list[int]]] = {}

    def _entering(self, batch: Batch) -> tuple[Batch, list[Kept], list[Source | None]]:
        """Return an input whose leaves have no history."""
        leaves = [x if x is None else x.detach().requires_grad_(x.requires_grad) for x in batch.leaves]
        sources: list[Source | None] = [None] * len(leaves)
        for k, leaf in enumerate(batch.leaves):
            if leaf is not None and leaf.requires_grad and self._backward:
                self._inputs.append((leaf, Arrival()))
                sources[k] = None, self._inputs[-1][1]
        return batch.replace(()), [*leaves], sources

    def entered(self) -> Iterator[tuple[Tensor, Leaf]]:
        """Yield the inputs that require grad, with their gradients."""
        for tensor, arrival in self._inputs:
            yield tensor, arrival.total()

    def end(self) -> None:
        """Note what the layers draw from, when all actions have run."""
        self._random_numbers.end(counts=self._has_rows, recomputes=self._recomputed)

    def forward(self, i: int, j: int, *, recomputes: bool) -> None:
        """See `Front.forward`."""
        column = self.columns[j]
        last = LastCell(i, column, self._finish, self._backward) if j == self._n - 1 else None
        cell = last or LayersCell(i, column)
        try:
            batch, values, sources = self._values.pop((i, j))
            leaves = _arrived(column.arriving, i, values)
            for portal in column.receiving:
                skip, source = self._skips.pop((i, portal.key))
                leaves += _arrived(portal.route, i, [skip])
                sources.append(source)
            cell.begin(batch)
            with self._random_numbers.of(i, column.stream.device):
                if not self._backward:
                    with column.recorded("forward", i), torch.no_grad(), column.layers.exclusively():
                        outputs = cell.compute(leaves)
                    exports: Sequence[Export | None] = [None] * len(outputs)
                else:
                    cell.sources = [
                        source for source, x in zip(sources, leaves) if source and x is not None and x.requires_grad
                    ]
                    outputs = self._run(cell, leaves, recomputes=recomputes)
                    if last is not None and cell.recomputes:
                        last.differentiate_loss(outputs)
                    self._cells[i, j], exports = cell, cell.exports
            self._aliases.verify_returned(outputs, column.where)
            mark_ready(column.leaving, i)
            if last is not None:
                grads, last.grads = last.grads, ()
                for end, grad in zip(exports, self._keep(grads, i, j, "B", j)):
                    if end is not None:
                        end.add(grad)
                return
            width = len(outputs) - len(column.sending)
            for portal, leaf, end in zip(column.sending, outputs[width:], exports[width:]):
                (skip,) = self._keep((leaf,), i, j, "F", self._poppers.get(portal.key, j))
                self._skips[i, portal.key] = skip, None if end is None else (portal.route, end)
            route = self.columns[j + 1].arriving if j + 1 < self._n else None
            self._values[i, j + 1] = (
                cell.end(()),
                self._keep(outputs[:width], i, j, "F", j + 1),
                [None if end is None else (route, end) for end in exports[:width]],
            )
        except BaseException as error:
            column.note(error, i, "forward")
            raise

    def _run(self, cell: LayersCell, leaves: Leaves, *, recomputes: bool) -> Leaves:
        """Run the layers of a cell, keep the input of one that runs again, and return the outputs.

        Args:
            cell: the cell
            leaves: the input
            recomputes: whether to run again, if there is anything to differentiate
        """
        i, j = cell.i, cell.column.j
        recomputes = recomputes and cell.column.needs_grad(leaves)
        outputs = cell.forward(leaves, recomputes=recomputes)
        if recomputes:
            kept = self._keep(leaves, i, j, "B", j)
            self._inputs_of[i, j] = kept, versions(resident(kept))
        return tuple([x if x is None else x.requires_grad_(end is not None) for x, end in zip(outputs, cell.exports)])

    def _keep(self, leaves: Leaves, i: int, j: int, kind: Literal["F", "B"], until: int) -> list[Kept]:
        """Return what is kept of the leaves of cell (i, j) until an action of column ``until``."""
        now: Half = ("F", i, j)
        then: Half = (kind, i, until)
        return [self.residence.keep(leaf, now, then) for leaf in leaves]

    def recompute(self, i: int, j: int) -> None:
        """See `ProgramFront.recompute`.

        Raises:
            RuntimeError: the input of the cell was changed in place since.
        """
        if (i, j) not in self._inputs_of:
            return  # There is nothing to differentiate.
        kept, before = self._inputs_of.pop((i, j))
        self._recomputed = True
        if versions(resident(kept)) != before:
            error = RuntimeError(
                f"{self.columns[j].where} cannot be recomputed, because its input was changed in place after it ran, "
                "perhaps by a later layer that was given a view of it; return a copy (output.clone()), or use "
                "checkpoint='never'"
            )
            self.columns[j].note(error, i, "recomputation")
            raise error
        self._cells[i, j].recompute_ahead(tuple(map(restored, kept)))

    def cell(self, i: int, j: int, *, last: bool) -> LayersCell:
        """See `ProgramFront.cell`."""
        return self._cells.pop((i, j)) if last else self._cells[i, j]

    def differentiating(self, j: int) -> AbstractContextManager[object]:
        """See `ProgramFront.differentiating`."""
        return self._aliases.filled(j)

    def cancel(self) -> None:
        """See `Front.cancel`."""


def _arrived(route: Route | None, i: int, kept: Sequence[Kept]) -> Leaves:
    """Return what is kept of micro-batch ``i`` where it is needed: restored there, or copied by a route."""
    leaves = resident(kept)
    moved = leaves if route is None else copy_forward(route, i, leaves)
    return tuple([restored(one) if leaf is None else leaf for one, leaf in zip(kept, moved)])


class LastCell(LayersCell):
    """A cell of the last partition, which computes the loss once.

    If the cell keeps its graph, the loss ends that. If it runs again, the loss has a graph of its own, which is
    differentiated at once, so that nothing of it is kept or recomputed:

        first run     layers ──► output ╎ output ──► loss
                                        ╎ grads  ◄── 1
        second run    layers ──► output ╎
        backward      layers ◄── grads ─┘

    Attributes:
        grads: the gradients of the leaves that `compute` has returned first
    """

    __slots__ = ("_backward", "_finish", "grads")

    def __init__(self, i: int, column: LayersColumn, finish: Finish, backward: bool) -> None:
        super().__init__(i, column)
        self._finish: Finish | None = finish
        self._backward = backward
        self.grads: Leaves = ()

    def compute(self, leaves: Leaves) -> Leaves:
        """Run the layers and, unless these will run or have run twice, the loss function behind them."""
        outputs = super().compute(leaves)
        if self._finish is None or (self._backward and not torch.is_grad_enabled()):
            return outputs
        share = self._finish(self.i, self.end(outputs))
        self.grads = (torch.ones_like(share),)
        return (share,)

    def differentiate_loss(self, outputs: Leaves) -> None:
        """Compute the loss of the output of a first run, and its gradients with respect to that."""
        assert self._finish is not None
        finish, self._finish = self._finish, None
        can_need = [x is not None and x.requires_grad for x in outputs]
        cut = CutGraph(self.column.stream.device, self.column.by_itself)
        with torch.enable_grad():
            entered = iter(cut.enter(*[x.detach() for x, can in zip(outputs, can_need) if can and x is not None]))
            share = finish(self.i, self.end(tuple([next(entered) if can else x for x, can in zip(outputs, can_need)])))
        if not share.requires_grad:
            self.grads = (None,) * len(outputs)
            return
        try:
            with torch.autograd.set_multithreading_enabled(False), self.column.ambient.without_autocast():
                edge, seed = get_gradient_edge(share), torch.ones_like(share)
                grads = iter(cut.differentiate([edge], [seed], self.column.sink, lambda _: nullcontext()))
        except BaseException as error:
            error.add_note("in the backward of the loss")
            raise
        self.grads = tuple([_of_its_own(next(grads)) if can else None for can in can_need])


def _of_its_own(grad: Leaf) -> Leaf:
    """Return a gradient that waits for backward, in memory that no later micro-batch adds to."""
    return grad.clone() if grad is not None and shares_memory(grad) else grad
