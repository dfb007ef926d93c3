"""Running a program: the actions of each device, forward and backward, without a graph between the cells.

The graph is cut where a partition begins, so the backward of a cell is a call, and a program says when it comes. Two
*fronts* give the cells: micro-batches of a Sequential (`step`), and frames of any module (`torchgpipe.frames`).

    F(i, j)   computes the cell; what it hands to later cells is noted there, with where its gradient arrives
    B(i, j)   differentiates the cell, and takes the gradients of what has entered it to the cells that they come from;
              I(i, j) does the same, and leaves the gradients of the parameters to W(i, j)

A program with one device runs in the caller's thread. With several, each device has a worker, which runs its actions in
their order, and each as soon as the actions that it needs have finished. All nodes of a cell's graph run in that
worker: a device thread of the autograd engine could not run them while it waits for another cell.

Gradients of parameters arrive at `aliases`, and go to ``.grad`` when all actions have run, see `delivery`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from torchgpipe.devices.stream import Stream
from torchgpipe.devices.typing import Leaves
from torchgpipe.engine.agenda import Agenda
from torchgpipe.engine.aliases import Aliases, filling_aliases
from torchgpipe.engine.copy import Route, copy_back, mark_ready, release, wait_back
from torchgpipe.engine.cut import Arrival, Returned
from torchgpipe.engine.function import unshare, without_gradient
from torchgpipe.engine.interrupts import uninterrupted
from torchgpipe.engine.out_of_memory import MiniBatchFacts, add_shortage
from torchgpipe.engine.record import Listener
from torchgpipe.engine.residence import Residence
from torchgpipe.engine.resting import Rested
from torchgpipe.engine.workers import Task, run_in_workers
from torchgpipe.replay.ambient import Ambient
from torchgpipe.schedule import Action

__all__ = ["Executor", "Front", "ProgramCell"]


class ProgramCell(Protocol):
    """Micro-batch i on partition j, as a program knows it."""

    def differentiate(self, *, split: bool, keep_graph: bool) -> Returned:
        """Differentiate the cell with the gradients that have arrived, and return those of what has entered it.

        Args:
            split: whether to leave the gradients of the parameters to `differentiate_weights`, if that is possible
            keep_graph: whether the graph will be differentiated again
        """

    def differentiate_weights(self) -> None:
        """Run what a split `differentiate` has left, if anything."""


class Front(Protocol):
    """Gives the cells of a mini-batch.

    Attributes:
        streams: where each partition computes
    """

    @property
    def streams(self) -> Sequence[Stream]: ...

    def leaving(self, j: int) -> Sequence[Route]:
        """Return the routes that begin at partition ``j``."""

    def forward(self, i: int, j: int, *, recomputes: bool) -> None:
        """Compute a cell; an error has a note of the place.

        Args:
            i: the micro-batch
            j: the partition
            recomputes: False if the backward of the cell comes next on its device, so that nothing is gained
        """

    def cell(self, i: int, j: int, *, last: bool) -> ProgramCell:
        """Return a cell that has been computed; if its last backward begins, nothing else need keep it."""

    def differentiating(self, i: int, j: int) -> AbstractContextManager[object]:
        """Surround a backward; an error in the ``with`` block gets a note of the place."""

    @property
    def partitions(self) -> Sequence[int]:
        """For each column, its partition, whose weights come and go together."""

    @property
    def listener(self) -> Listener | None:
        """The listener of the mini-batch, if there is one."""

    @property
    def watches(self) -> bool:
        """Whether to look at each operation on weights that live in host memory."""

    def place(self, j: int) -> int:
        """Return the partition that runs in j, for errors."""

    def cancel(self) -> None:
        """Wind up what is under way, after an error."""


class Executor:
    """Runs the actions of a program.

    Args:
        front: gives the cells
        aliases: the aliases of the parameters
        ambient: the settings of the caller
        facts: what a note about memory is made from
    """

    def __init__(self, front: Front, aliases: Aliases, ambient: Ambient, facts: MiniBatchFacts) -> None:
        self._front, self._aliases, self._ambient, self._facts = front, aliases, ambient, facts
        self._residence: Residence | None = None

    def run(self, agenda: Agenda, ambient: Ambient, *, keep_graph: bool = False) -> None:
        """Run actions, inline or in workers.

        Args:
            agenda: the actions
            ambient: the settings that workers run in
            keep_graph: whether the graphs will be differentiated again

        Raises:
            BaseException: the error of the first action that failed, in the order of the agenda, with notes
        """
        actions, streams = agenda.actions, self._front.streams

        def run(number: int) -> None:
            self._run(actions[number], recomputes=actions[number][1:] not in agenda.keeps, keep_graph=keep_graph)

        with self._resident(actions):
            if len({stream.device for stream in streams}) == 1:
                with streams[0].use():
                    for number in range(len(actions)):
                        run(number)
            else:
                tasks = [Task(streams[action.j], needs) for action, needs in zip(actions, agenda.needs)]
                try:
                    run_in_workers(tasks, run, ambient)
                finally:
                    release([route for j in range(len(streams)) for route in self._front.leaving(j)])

    def run_in_this_thread(self, actions: Sequence[Action]) -> None:
        """Run actions one after the other, whatever their devices."""
        with self._resident(actions):
            for action in actions:
                with self._front.streams[action.j].use():
                    self._run(action, recomputes=True, keep_graph=False)

    @contextmanager
    def _resident(self, actions: Sequence[Action]) -> Iterator[None]:
        """Let weights come and go in a ``with`` block, and wind up after an error."""
        front = self._front
        if self._aliases.host_memory is not None:
            self._residence = Residence(
                self._aliases, front.streams, actions, front.partitions, front.listener, watches=front.watches
            )
        try:
            try:
                yield
            except BaseException:
                uninterrupted(front.cancel)
                raise
        finally:
            if self._residence is not None:
                self._residence.end()

    def _run(self, action: Action, *, recomputes: bool, keep_graph: bool) -> None:
        """Run one action. All of them pass here: what a partition needs on its device comes before, and goes after."""
        kind, i, j = action
        residence = self._residence
        try:
            if residence is not None:
                residence.before(action)
            if kind == "F":
                with nullcontext() if residence is None else residence.watching(j):
                    self._front.forward(i, j, recomputes=recomputes)
                mark_ready(self._front.leaving(j), i)
            else:
                self._return(action, self._backward(kind, i, j, keep_graph))
            if residence is not None:
                residence.after(action)
        except BaseException as error:
            place = Action(kind, i, self._front.place(j))
            add_shortage(error, self._facts, place, self._front.streams[j].device)
            raise

    def _backward(self, kind: str, i: int, j: int, keep_graph: bool) -> Returned:
        front = self._front
        returned: Returned = []
        cell = front.cell(i, j, last=kind != "I" and not keep_graph)
        # In this thread, and outside of autocast, as `loss.backward()` is.
        with (
            front.differentiating(i, j),
            filling_aliases(),
            torch.autograd.set_multithreading_enabled(False),
            self._ambient.without_autocast(),
            nullcontext() if self._residence is None else self._residence.watching(j),
        ):
            fresh = without_gradient(self._aliases.of(j))
            if kind == "W":
                cell.differentiate_weights()
            else:
                wait_back(front.leaving(j), i)
                returned = cell.differentiate(split=kind == "I", keep_graph=keep_graph)
            unshare(fresh)
        return returned

    def _return(self, action: Action, returned: Returned) -> None:
        """Take gradients to the cells that they come from; those that take the same route go together."""
        i, resting = action.i, self._aliases.resting
        by_route: dict[Route | None, list[tuple[Arrival, Tensor]]] = {}
        for route, arrival, grad in returned:
            if resting is not None and arrival.column is not None:
                rested = resting.rest(grad, action, Action("B", i, arrival.column))
                if isinstance(rested, Rested):
                    arrival.add(rested)
                    continue
            by_route.setdefault(route, []).append((arrival, grad))
        for route, pairs in by_route.items():
            grads: Leaves = tuple([grad for _, grad in pairs])
            if route is not None:
                grads = copy_back(route, i, grads)
            for (arrival, _), moved in zip(pairs, grads):
                arrival.add(moved)
