"""Running a program: the actions of each device, forward and backward.

The graph is cut where a partition begins, so the backward of a cell is a call, and a program says when it comes. Two
*fronts* give the cells: micro-batches of a Sequential (`step`), and frames of any module (`torchgpipe.run`). A third
runs forward actions only, and leaves the caller a graph, which autograd drives (`autograd`).

    F(i, j)   computes the cell; what it hands to later cells is noted there, with where its gradient arrives
    B(i, j)   differentiates the cell, and takes the gradients of what has entered it to the cells that they come from;
              I(i, j) does the same, and leaves the gradients of the parameters to W(i, j)
    R(i, j)   runs again what a cell recomputes, as soon as its device is free: before its gradient is there. A cell of
              layers has left no graph; of frames it is the modules that it recomputes, of which the last comes first

A program with one device runs in the caller's thread. So does one whose cells draw from the generator of the CPU, of
Python or of NumPy, which all threads share: a cell has it to itself, and nothing is locked. Else each device has a
worker, which runs its actions in their order, and each as soon as the actions that it needs have finished. All nodes of
a cell's graph run in that worker: a device thread of the autograd engine could not run them while it waits for another
cell.

Gradients of parameters arrive at `aliases`, and go to ``.grad`` when all actions have run, see `gradients.of_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor

from torchgpipe.cell.cell import Arrival, Cell, Source
from torchgpipe.cell.column import Column
from torchgpipe.cell.out_of_memory import MiniBatchFacts, add_shortage
from torchgpipe.devices.interrupts import uninterrupted
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.drive.agenda import Agenda
from torchgpipe.drive.workers import Task, run_in_workers
from torchgpipe.offload.residence import RESIDENT, Residence
from torchgpipe.replay.ambient import Ambient
from torchgpipe.schedule import Action
from torchgpipe.transport.route import Route, copy_back, release, wait_back

__all__ = ["Executor", "Front", "ProgramFront"]


class Front(Protocol):
    """Gives the cells of a mini-batch."""

    @property
    def columns(self) -> Sequence[Column]:
        """The columns of cells."""

    def forward(self, i: int, j: int, *, recomputes: bool) -> None:
        """Compute a cell, and mark where it is computed on what leaves it; an error has a note of the place.

        Args:
            i: the micro-batch
            j: the column
            recomputes: whether an R of this cell comes
        """

    def cancel(self) -> None:
        """Wind up what is under way, after an error."""


class ProgramFront(Front, Protocol):
    """Gives the cells of a mini-batch whose backward is a part of the program, too."""

    def recompute(self, i: int, j: int) -> None:
        """Run again what a cell recomputes, or the part of it with which its backward begins."""

    def cell(self, i: int, j: int, *, last: bool) -> Cell | None:
        """Return a cell that has been computed; if its last backward begins, nothing else need keep it.

        None if there is nothing to differentiate.
        """

    def differentiating(self, j: int) -> AbstractContextManager[object]:
        """Surround a backward in column ``j``, whose gradients of parameters arrive meanwhile."""


class Executor:
    """Runs the actions of a program.

    Args:
        front: gives the cells
        ambient: the settings that workers run in
        facts: what a note about memory is made from; None if cells make these notes themselves
        residence: which tensors are on their devices
        in_one_thread: whether the caller's thread runs the actions of all devices
    """

    def __init__(
        self,
        front: Front,
        ambient: Ambient,
        facts: MiniBatchFacts | None = None,
        residence: Residence = RESIDENT,
        *,
        in_one_thread: bool = False,
    ) -> None:
        self._front, self._ambient, self._facts, self._residence = front, ambient, facts, residence
        self._in_one_thread = in_one_thread

    def run(self, agenda: Agenda, *, keep_graph: bool = False) -> None:
        """Run actions: those of one device in the caller's thread, and those of several in workers, unless told else.

        Args:
            agenda: the actions
            keep_graph: whether the graphs will be differentiated again

        Raises:
            BaseException: the error of the first action that failed, in the order of the agenda, with notes
        """
        actions, columns = agenda.actions, self._front.columns

        def run(number: int) -> None:
            action = actions[number]
            self._run(action, recomputes=action[1:] in agenda.recomputed, keep_graph=keep_graph)

        with self._resident(actions):
            if len({column.stream.device for column in columns}) == 1:
                with columns[0].stream.use():
                    for number in range(len(actions)):
                        run(number)
                return
            try:
                if self._in_one_thread:
                    for number, action in enumerate(actions):
                        with columns[action.j].stream.use():
                            run(number)
                else:
                    tasks = [Task(columns[action.j].stream, needs) for action, needs in zip(actions, agenda.needs)]
                    run_in_workers(tasks, run, self._ambient)
            finally:
                release([route for column in columns for route in column.leaving])

    @contextmanager
    def _resident(self, actions: Sequence[Action]) -> Iterator[None]:
        """Begin and end the residence of what actions need in a ``with`` block, and wind up after an error."""
        self._residence.begin(actions)
        try:
            try:
                yield
            except BaseException:
                uninterrupted(self._front.cancel)
                raise
        finally:
            self._residence.end()

    def _run(self, action: Action, *, recomputes: bool, keep_graph: bool) -> None:
        """Run one action. All of them pass here, so the residence of what a partition needs is settled here."""
        kind, i, j = action
        residence = self._residence
        try:
            residence.before(action)
            if kind == "F":
                with residence.watched(lambda: j):
                    self._front.forward(i, j, recomputes=recomputes)
            else:
                self._run_backward(action, keep_graph)
            residence.after(action)
        except BaseException as error:
            if self._facts is not None:
                column = self._front.columns[j]
                add_shortage(error, self._facts, Action(kind, i, column.partition), column.stream.device)
            raise

    def _run_backward(self, action: Action, keep_graph: bool) -> None:
        """Run R, B, I or W."""
        kind, i, j = action
        front = cast(ProgramFront, self._front)
        watched = self._residence.watched(lambda: j)
        if kind == "R":
            with watched:
                front.recompute(i, j)
            return
        # In this thread, and outside of autocast, as `loss.backward()` is.
        with (
            front.differentiating(j),
            torch.autograd.set_multithreading_enabled(False),
            self._ambient.without_autocast(),
            watched,
        ):
            cell = front.cell(i, j, last=kind != "I" and not keep_graph)
            if cell is None:
                return
            sources, grads = cell.sources, list[Leaf]()
            if not keep_graph:
                cell.sources = []  # They lead to the graphs of earlier columns, which are to be freed before W comes.
            if kind == "W":
                cell.differentiate_weights()
            else:
                wait_back(cell.column.leaving, i)
                grads = cell.differentiate(cell.arrived(), split=kind == "I", keep_graph=keep_graph)
            del cell  # With what only its graph needs.
        self._return(action, sources, grads)

    def _return(self, action: Action, sources: Sequence[Source], grads: Sequence[Leaf]) -> None:
        """Take gradients to the cells that they come from; those that take the same route go together."""
        i = action.i
        by_route: dict[Route | None, list[tuple[Arrival, Tensor]]] = {}
        for (route, arrival), grad in zip(sources, grads):
            if grad is None:
                continue
            kept = grad if arrival.column is None else self._residence.keep(grad, action, ("B", i, arrival.column))
            if kept is grad:
                by_route.setdefault(route, []).append((arrival, grad))
            else:
                arrival.add(kept)
        for route, pairs in by_route.items():
            together: Leaves = tuple([grad for _, grad in pairs])
            if route is not None:
                together = copy_back(route, i, together)
            for (arrival, _), moved in zip(pairs, together):
                arrival.add(moved)
