"""A step: forward and backward of a mini-batch under a program, without a graph between the cells.

The graph is cut where a partition begins, so the backward of a cell is a call, and a program says when it comes. What
travels between cells is in four tables, each entry written by one action and taken by another:

    activations (i, j)   from F(i, j-1) to F(i, j)          gradients (i, j)   from B(i, j+1) to B(i, j)
    skips (i, key)       from the stash to the pop          and their gradients, from the pop to the stash

In a program, j is a partition. Here j is a view, which may be a part of a partition, or several partitions; see
`agenda`.

A program with one device runs in the caller's thread. With several, each device has a worker, which runs its actions in
their order, and each as soon as the actions that it needs have finished. All nodes of a cell's graph run in that
worker: a device thread of the autograd engine could not run them while it waits for another cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.engine.agenda import Agenda, agenda_of
from torchgpipe.engine.calls import Mechanisms, begin_step, make_calls
from torchgpipe.engine.copy import copy_back, copy_forward, mark_ready, release, wait_back
from torchgpipe.engine.cut_cell import CutCell, Finish, SeededCell
from torchgpipe.engine.direct_gradients import DirectGradients, deliver, reduce
from torchgpipe.engine.function import refuse_transforms
from torchgpipe.engine.out_of_memory import MiniBatchFacts, add_shortage, facts_of, rows_of_largest
from torchgpipe.engine.record import Step
from torchgpipe.engine.replicas import Replicas
from torchgpipe.engine.workers import Task, run_in_workers
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition
from torchgpipe.model.views import Joined, joinable, views_of_each
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.replay.seeds import LayerSeeds
from torchgpipe.schedule import Action, Program, Schedule
from torchgpipe.skip.namespace import SkipKey

__all__ = ["run_step"]


def run_step(
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    inputs: list[Batch],
    program: Program,
    finish: Finish,
    mechanisms: Mechanisms,
    *,
    gather: Callable[[], Any],
    stops: Sequence[int],
    backward: bool,
    replicas: Replicas,
    schedule: Schedule,
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
        stops: for each view, how many micro-batches, from the first on, may be recomputed
        backward: whether to run backward
        replicas: the replicas of the pipeline, which run a step at the same time
        schedule: what the program comes from, for errors

    Raises:
        BaseException: the error of the first action that failed, with notes; ``.grad`` is as it was before.
    """
    with replicas.together("the preparation of a step"):
        refuse_transforms()
        step = begin_step(len(inputs), partitions, devices, mechanisms, program)
        # A listener hears of each partition.
        joins = joinable(partitions, devices, stops) if step is None else (False,) * len(partitions)
        views = tuple(map(tuple, views_of_each(partitions)))
        rows = rows_of_largest(inputs)
        facts = partial(facts_of, partitions, devices, len(inputs), rows, stops, schedule, program, backward=backward)
        agenda = agenda_of(tuple(map(tuple, program)), views, joins, backward=backward)
        columns = agenda.columns
        joined = [Joined([partitions[k] for k in own]) if len(own) > 1 else partitions[own[0]] for own in columns]
        devices, stops = [devices[own[0]] for own in columns], [stops[own[0]] for own in columns]
        cells = _Step(joined, devices, inputs, finish, mechanisms, stops, backward, replicas, step, facts)
    return cells.run(agenda, gather)


class _Step:
    """The cells of a step, and what travels between them. See `run_step` for the arguments."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        devices: Sequence[torch.device],
        inputs: list[Batch],
        finish: Finish,
        mechanisms: Mechanisms,
        stops: Sequence[int],
        backward: bool,
        replicas: Replicas,
        step: Step | None,
        facts: Callable[[], MiniBatchFacts],
    ) -> None:
        self._facts = facts
        self._m, self._n = len(inputs), len(partitions)
        self._finish = finish
        self._stops = stops
        self._replicas = replicas
        self._backward_runs = backward
        self._ambient = Ambient()
        self._seeds = LayerSeeds(partitions, devices)
        self._recomputed = False
        self._calls = make_calls(
            partitions,
            devices,
            mechanisms,
            lambda device, modules: RandomStates(device, modules, beside=False, between=True, seeded=True),
            ambient=self._ambient,
            ordered=False,
            replicated=False,
            step=step,
        )
        self._activations = {(i, 0): _cut(batch) for i, batch in enumerate(inputs)}
        self._inputs = inputs
        self._skips: dict[tuple[int, SkipKey], Leaf] = {}
        self._gradients: dict[tuple[int, int], Leaves] = {}
        self._skip_gradients: dict[tuple[int, SkipKey], Leaf] = {}
        self._cells: dict[tuple[int, int], CutCell] = {}

    def run(self, agenda: Agenda, gather: Callable[[], Any]) -> Any:
        """Run all actions, and deliver the gradients, or leave ``.grad`` as it was."""
        try:
            with self._ambient.fresh_casts(), self._replicas.together("the step", self._reduced):
                if self._backward_runs:
                    self._begin_gradients()
                self._run_actions(agenda)
                if self._recomputed:
                    self._seeds.verify()
                gathered = gather()
            if self._backward_runs:
                self._end_gradients()
            return gathered
        except BaseException:
            for call in self._calls:
                if call.direct is not None:
                    call.direct.restore()
            raise

    def _run_actions(self, agenda: Agenda) -> None:
        def run(number: int) -> None:
            kind, i, j = agenda.actions[number]
            try:
                if kind == "F":
                    self._forward(i, j, (i, j) in agenda.keeps)
                elif kind == "W":
                    with self._differentiating():
                        self._cells.pop((i, j)).differentiate_weights()
                else:
                    self._backward(i, j, split=kind == "I")
            except BaseException as error:
                add_shortage(error, self._facts, Action(kind, i, self._calls[j].running))
                raise

        calls = self._calls
        if len({call.device for call in calls}) == 1:
            with calls[0].stream.use():
                for number in range(len(agenda.actions)):
                    run(number)
        else:
            streams = [calls[action.j].stream for action in agenda.actions]
            try:
                run_in_workers([Task(*task) for task in zip(streams, agenda.needs)], run, self._ambient)
            finally:
                release([route for call in calls for route in call.leaving])
                self._seeds.end()

    @contextmanager
    def _differentiating(self) -> Iterator[None]:
        """Run backward in a ``with`` block: in this thread, and outside of autocast, as ``loss.backward()`` is."""
        with torch.autograd.set_multithreading_enabled(False), self._ambient.without_autocast():
            yield

    def _begin_gradients(self) -> None:
        owners = Counter([parameter for call in self._calls for parameter in call.parameters])
        for call in self._calls:
            shared = any([owners[parameter] > 1 for parameter in call.parameters])
            call.direct = DirectGradients(call.parameters, call.frozen, shared=shared)

    def _reduced(self) -> Sequence[Tensor]:
        """Return the parameters whose gradients are reduced."""
        return list(dict.fromkeys([one for call in self._calls for one in call.parameters if self._backward_runs]))

    def _end_gradients(self) -> None:
        direct = [call.direct for call in self._calls if call.direct is not None]
        reduce(direct, self._replicas)
        with self._replicas.together("the end of the step"):
            self._deliver(direct)
        for one in direct:  # Behind everything that may fail.
            one.commit()

    def _deliver(self, direct: Sequence[DirectGradients]) -> None:
        """Let gradients arrive at the parameters with hooks, and at the input."""
        deliver([pair for one in direct for pair in one.sums()])
        roots, grads = [], []
        for i, batch in enumerate(self._inputs):
            for leaf, grad in zip(batch.leaves, self._gradients.get((i, -1)) or ()):
                if leaf is not None and grad is not None and leaf.requires_grad:
                    roots.append(leaf)
                    grads.append(grad)
        if roots:
            torch.autograd.backward(roots, grads)

    def _forward(self, i: int, j: int, keeps: bool) -> None:
        call = self._calls[j]
        cell = SeededCell(call, i, self._m, self._seeds, self._finish if j == self._n - 1 else None)
        try:
            batch = self._activations.pop((i, j))
            leaves = batch.leaves if call.arriving is None else copy_forward(call.arriving, i, batch.leaves)
            for portal in call.receiving:
                skip = self._skips.pop((i, portal.key))
                leaves += (skip,) if portal.route is None else copy_forward(portal.route, i, (skip,))
            cell.begin(batch)
            cut = CutCell(cell, recompute=i < self._stops[j] and not keeps)
            outputs = cut.run(leaves, backward=self._backward_runs)
            if self._backward_runs:
                self._cells[i, j] = cut
            mark_ready(call.leaving, i)
            if j < self._n - 1:
                width = len(outputs) - len(call.sending)
                self._skips.update({(i, portal.key): leaf for portal, leaf in zip(call.sending, outputs[width:])})
                self._activations[i, j + 1] = cell.end(outputs[:width])
        except BaseException as error:
            cell.failed(error, "forward")
            raise

    def _backward(self, i: int, j: int, *, split: bool) -> None:
        call, cut = self._calls[j], self._cells[i, j]
        if not split:
            del self._cells[i, j]
        if j == self._n - 1:
            grads: Leaves = (torch.ones(1, device=call.device),)
        else:
            wait_back(call.leaving, i)
            grads = self._gradients.pop((i, j))
            grads += tuple([self._skip_gradients.pop((i, portal.key)) for portal in call.sending])
        self._recomputed |= cut.recomputes
        with self._differentiating():
            result = cut.differentiate(grads, split=split)
        width = len(result) - len(call.receiving)
        for portal, grad in zip(call.receiving, result[width:]):
            back = (grad,) if portal.route is None else copy_back(portal.route, i, (grad,))
            self._skip_gradients[i, portal.key] = back[0]
        result = result[:width]
        if call.arriving is not None:
            result = copy_back(call.arriving, i, result)
        self._gradients[i, j - 1] = result


def _cut(batch: Batch) -> Batch:
    """Return a batch whose leaves have no history."""
    return batch.replace(tuple([x if x is None else x.detach().requires_grad_(x.requires_grad) for x in batch.leaves]))
