"""A step of a Sequential: its micro-batches, as the front of a program.

What travels from cell to cell is the leaves of a value, and skips; each with where its gradient arrives. In a program,
j is a partition. Here j is a view, which may be a part of a partition, or several partitions; see `agenda`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.torch_internals import shares_memory, versions
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.agenda import Agenda, agenda_of
from torchgpipe.engine.aliases import Aliases, filling_aliases, weights_of
from torchgpipe.engine.calls import Mechanisms, begin_step, make_calls
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.copy import Route, copy_forward
from torchgpipe.engine.cut import Arrival, CutGraph, Returned
from torchgpipe.engine.delivery import with_gradients
from torchgpipe.engine.execute import Executor
from torchgpipe.engine.function import refuse_transforms
from torchgpipe.engine.host_memory import HostMemory
from torchgpipe.engine.kept import KeptGraph
from torchgpipe.engine.out_of_memory import facts_of
from torchgpipe.engine.partition_call import PartitionCall
from torchgpipe.engine.recomputation import Recomputation, may_need_grad
from torchgpipe.engine.record import Listener
from torchgpipe.engine.replicas import Replicas
from torchgpipe.engine.resting import Rested, awake
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition
from torchgpipe.model.views import Joined, joinable, views_of_each
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.replay.random_numbers import RandomNumbers
from torchgpipe.schedule import Action, Program, Schedule
from torchgpipe.skip.namespace import SkipKey

__all__ = ["run_step"]

#: Turns the output of micro-batch ``i`` into its share of the loss, of shape (1,).
Finish: TypeAlias = Callable[[int, Batch], Tensor]

#: Where the gradient of a tensor goes: the route to the cell before (None if the memory is shared), and the exit there.
Source: TypeAlias = tuple[Route | None, Arrival]


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
    replicas: Replicas,
    schedule: Schedule,
    lock: AbstractContextManager[Any],
    random_numbers: RandomNumbers,
    host_memory: HostMemory | None = None,
    watches: bool = False,
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
        replicas: the replicas of the pipeline, which run a step at the same time
        schedule: what the program comes from, for errors
        lock: held while the layers have aliases of their parameters
        random_numbers: the random numbers of the mini-batch
        host_memory: takes weights to devices, if they live in host memory
        watches: whether to look at each operation on weights that live in host memory

    Raises:
        BaseException: the error of the first action that failed, with notes; ``.grad`` is as it was before.
    """
    with lock:
        with replicas.together("the preparation of a step"):
            refuse_transforms()
            listener = begin_step(len(inputs), partitions, devices, mechanisms, program)
            # A listener hears of each partition.
            apart = listener is not None or host_memory is not None
            joins = (False,) * len(partitions) if apart else joinable(partitions, devices, checkpointed)
            views = tuple(map(tuple, views_of_each(partitions)))
            facts = facts_of(schedule, partitions, checkpointed, backward=backward)
            agenda = agenda_of(tuple(map(tuple, program)), views, joins, backward=backward)
            columns = agenda.columns
            joined = [
                Joined([partitions[k] for k in views]) if len(views) > 1 else partitions[views[0]] for views in columns
            ]
            devices = [devices[views[0]] for views in columns]
            checkpointed = [checkpointed[views[0]] for views in columns]
            modules = [list(partition.modules()) for partition in joined]
            slots = [
                (module, name, j)
                for j, modules_of_view in enumerate(modules if backward or host_memory is not None else [])
                for module in modules_of_view
                for name, _ in module._parameters.items()
            ]
            streams = None if host_memory is None else mechanisms.streams
            if host_memory is not None:
                host_memory.keep_frozen(weights_of(slots), devices)
            aliases = Aliases(slots, devices, streams, lock, backward=backward, host_memory=host_memory)

        def work() -> Any:
            with aliases.installed():
                cells = _MicroBatches(
                    joined,
                    devices,
                    modules,
                    inputs,
                    finish,
                    mechanisms,
                    checkpointed,
                    backward,
                    listener,
                    aliases,
                    random_numbers,
                    watches,
                )
                with cells.ambient.fresh_casts(), replicas.together("the step", lambda: aliases.trained):
                    cells.run(Executor(cells, aliases, cells.ambient, facts), agenda)
                    return gather(), cells.entered()

        return with_gradients(aliases, work, replicas) if backward else work()[0]


class _MicroBatches:
    """The cells of a step, and what travels between them. See `run_step` for the arguments.

    Attributes:
        ambient: the settings of the caller
        streams: where each partition computes
        partitions: for each view, its partition
        listener: the listener of the mini-batch, if there is one
        watches: whether to look at each operation on weights that live in host memory
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        devices: Sequence[torch.device],
        modules: Sequence[list[nn.Module]],
        inputs: list[Batch],
        finish: Finish,
        mechanisms: Mechanisms,
        checkpointed: Sequence[int],
        backward: bool,
        listener: Listener | None,
        aliases: Aliases,
        random_numbers: RandomNumbers,
        watches: bool,
    ) -> None:
        self._aliases, self.watches, self.listener = aliases, watches, listener
        self._m, self._n = len(inputs), len(partitions)
        self._finish, self._checkpointed, self._backward = finish, checkpointed, backward
        self.ambient = Ambient()
        self._random_numbers = random_numbers
        self._has_rows = any([leaf is not None and leaf.numel() > 0 for leaf in inputs[0].leaves])
        self._recomputed = False
        self._calls = make_calls(
            partitions,
            devices,
            modules,
            mechanisms,
            lambda device, owned: RandomStates(
                device, owned, beside=False, between=True, generators=random_numbers.following(device)
            ),
            ambient=self.ambient,
            ordered=False,
            in_program=True,
            listener=listener,
        )
        self.streams = [call.stream for call in self._calls]
        self.partitions = [call.j for call in self._calls]
        #: The inputs that require grad, with where their gradients arrive.
        self._inputs: list[tuple[Tensor, Arrival]] = []
        self._values = {(i, 0): self._entering(batch) for i, batch in enumerate(inputs)}
        self._skips: dict[tuple[int, SkipKey], tuple[Leaf | Rested, Source | None]] = {}
        #: Where each skip is popped.
        self._poppers = {portal.key: j for j, call in enumerate(self._calls) for portal in call.receiving}
        self._cells: dict[tuple[int, int], _StepCell] = {}

    def _entering(self, batch: Batch) -> tuple[Batch, list[Leaf | Rested], list[Source | None]]:
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

    def run(self, executor: Executor, agenda: Agenda) -> None:
        """Run all actions."""
        executor.run(agenda, self.ambient)
        self._random_numbers.end(counts=self._has_rows, recomputes=self._recomputed)

    def leaving(self, j: int) -> Sequence[Route]:
        return self._calls[j].leaving

    def place(self, j: int) -> int:
        return self._calls[j].running

    def forward(self, i: int, j: int, *, recomputes: bool) -> None:
        call, is_last = self._calls[j], j == self._n - 1
        last = _LastCell(call, i, self._m, self._finish, self._backward) if is_last else None
        cell = last or Cell(call, i, self._m)
        try:
            batch, values, sources = self._values.pop((i, j))
            leaves = _brought(call.arriving, i, values)
            for portal in call.receiving:
                skip, source = self._skips.pop((i, portal.key))
                leaves += _brought(portal.route, i, [skip])
                values.append(skip)
                sources.append(source)
            cell.begin(batch)
            with self._random_numbers.of(i, call.device):
                if not self._backward:
                    with cell.recorded("forward"), torch.no_grad(), call.layers.exclusively():
                        outputs = cell.compute(leaves)
                    exits: Sequence[Arrival | None] = [None] * len(outputs)
                else:
                    step_cell = _StepCell(cell, j, sources, recomputes=recomputes and i < self._checkpointed[j])
                    keep = partial(self._let_rest, values, leaves, Action("F", i, j), Action("B", i, j))
                    outputs = step_cell.run(leaves, keep)
                    if last is not None and step_cell.recomputes:
                        last.differentiate_loss(outputs)
                    self._cells[i, j], exits = step_cell, step_cell.exits
            if self._aliases.host_memory is not None:
                self._aliases.verify_returned(outputs, call.where)
            now = Action("F", i, j)
            if last is not None:
                grads, last.grads = last.grads, ()
                for end, grad in zip(exits, self._let_rest(grads, grads, now, Action("B", i, j))):
                    if end is not None:
                        end.add(grad)
                return
            width = len(outputs) - len(call.sending)
            for portal, leaf, end in zip(call.sending, outputs[width:], exits[width:]):
                (skip,) = self._let_rest([leaf], [leaf], now, Action("F", i, self._poppers[portal.key]))
                self._skips[i, portal.key] = skip, None if end is None else (portal.route, end)
            route = self._calls[j + 1].arriving
            self._values[i, j + 1] = (
                cell.end(()),
                self._let_rest(outputs[:width], outputs[:width], now, Action("F", i, j + 1)),
                [None if end is None else (route, end) for end in exits[:width]],
            )
        except BaseException as error:
            cell.failed(error, "forward")
            raise

    def _let_rest(
        self, values: Sequence[Leaf | Rested], leaves: Sequence[Leaf], now: Action, until: Action
    ) -> list[Leaf | Rested]:
        """Return leaves, or where they rest until an action; those that have been in host memory are there."""
        resting = self._aliases.resting
        if resting is None:
            return [*leaves]
        return [
            None if leaf is None else resting.rest(leaf, now, until, value if isinstance(value, Rested) else None)
            for value, leaf in zip(values, leaves)
        ]

    def cell(self, i: int, j: int, *, last: bool) -> _StepCell:
        cell = self._cells.pop((i, j)) if last else self._cells[i, j]
        self._recomputed |= cell.recomputes
        return cell

    def differentiating(self, i: int, j: int) -> AbstractContextManager[object]:
        # A cell adds the notes itself: one phase is a recomputation.
        return self._random_numbers.backward(self.streams[j].device)

    def cancel(self) -> None:
        pass


def _brought(route: Route | None, i: int, values: Sequence[Leaf | Rested]) -> Leaves:
    """Return values of micro-batch ``i`` where they are needed, whether they rest, or come by a route."""
    plain = _at_hand(values)
    moved = iter(plain if route is None else copy_forward(route, i, plain))
    return tuple([value.get() if isinstance(value, Rested) else leaf for value, leaf in zip(values, moved)])


def _at_hand(values: Sequence[Leaf | Rested]) -> Leaves:
    return tuple([None if isinstance(value, Rested) else value for value in values])


class _LastCell(Cell):
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

    def __init__(self, call: PartitionCall, i: int, m: int, finish: Finish, backward: bool) -> None:
        super().__init__(call, i, m)
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
        cut = CutGraph(self.call.device, self.call.by_itself)
        with torch.enable_grad():
            entered = iter(cut.enter(*[x.detach() for x, can in zip(outputs, can_need) if can and x is not None]))
            share = finish(self.i, self.end(tuple([next(entered) if can else x for x, can in zip(outputs, can_need)])))
        if not share.requires_grad:
            self.grads = (None,) * len(outputs)
            return
        try:
            with (
                filling_aliases(),
                torch.autograd.set_multithreading_enabled(False),
                self.call.ambient.without_autocast(),
            ):
                edge, seed = get_gradient_edge(share), torch.ones_like(share)
                grads = iter(cut.differentiate([edge], [seed], self.call.sink, lambda _: nullcontext()))
        except BaseException as error:
            error.add_note("in the backward of the loss")
            raise
        self.grads = tuple([_of_its_own(next(grads)) if can else None for can in can_need])


def _of_its_own(grad: Leaf) -> Leaf:
    """Return a gradient that waits for backward, in memory that no later micro-batch adds to."""
    return grad.clone() if grad is not None and shares_memory(grad) else grad


class _StepCell:
    """A cell that is differentiated by a program.

    Args:
        cell: the cell
        column: its column
        sources: for each leaf of the input, where its gradient goes
        recomputes: whether to keep the input only, and to run again at backward

    Attributes:
        exits: for each leaf of the output, where its gradient arrives; None if it needs none
    """

    __slots__ = ("_cell", "_column", "_leaves", "_needed", "_recomputes", "_run", "_sources", "_versions", "exits")

    def __init__(self, cell: Cell, column: int, sources: Sequence[Source | None], *, recomputes: bool) -> None:
        self._cell, self._column, self._sources, self._recomputes = cell, column, sources, recomputes
        self._run: Recomputation | KeptGraph | None = None
        #: The input, if the cell runs again.
        self._leaves: Sequence[Leaf | Rested] = ()
        #: For each leaf of the input, whether it requires grad.
        self._needed: list[bool] = []
        self.exits: list[Arrival | None] = []

    @property
    def recomputes(self) -> bool:
        """Whether the cell will run again."""
        return isinstance(self._run, Recomputation)

    def run(self, leaves: Leaves, keep: Callable[[], Sequence[Leaf | Rested]]) -> Leaves:
        """Run the cell, and return its outputs without their graph; ``requires_grad`` tells which need gradients.

        Args:
            leaves: the leaves of the input
            keep: returns what to keep of them, if the cell runs again
        """
        if self._recomputes and self._cell.call.needs_grad(leaves):
            self._run = Recomputation(self._cell)
            with torch.no_grad():
                outputs = self._run.first_run(leaves)
            self._leaves = keep()
            self._versions = versions(_at_hand(self._leaves))
            needs = may_need_grad(leaves, outputs)
        else:
            self._run = KeptGraph(self._cell)
            self._needed = [leaf is not None and leaf.requires_grad for leaf in leaves]
            outputs = self._run.only_run(leaves)
            needs = [x is not None and x.requires_grad for x in outputs]
        self.exits = [Arrival(self._column) if need else None for need in needs]
        return tuple([x if x is None else x.detach().requires_grad_(need) for x, need in zip(outputs, needs)])

    def differentiate(self, *, split: bool, keep_graph: bool) -> Returned:
        """See `ProgramCell.differentiate`."""
        run, leaves = self._run, self._leaves
        grads = tuple([None if end is None else end.total() for end in self.exits])
        if not split:
            self._run, self._leaves = None, ()
        if run is None or all([grad is None for grad in grads]):
            return []
        if isinstance(run, Recomputation):
            self._run, self._leaves = None, ()
            if versions(_at_hand(leaves)) != self._versions:
                raise RuntimeError(
                    f"{self._cell.call.where} cannot be recomputed, because its input was changed in place after it "
                    "ran, perhaps by a later layer that was given a view of it; return a copy (output.clone()), or use "
                    "checkpoint='never'"
                )
            run.second_run(tuple([awake(leaf) for leaf in leaves]))
            result = run.differentiate(grads, runs_again=False)
        else:
            result = run.differentiate(grads, self._needed, split=split, keep_graph=keep_graph)
        return [(*source, grad) for source, grad in zip(self._sources, result) if source and grad is not None]

    def differentiate_weights(self) -> None:
        """Run what a split `differentiate` has left, if anything."""
        run, self._run = self._run, None
        if isinstance(run, KeptGraph):
            run.differentiate_weights()
