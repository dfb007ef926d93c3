"""The micro-batches of a step whose partitions are in several processes.

Each process runs its own part of the program, as if there were no other partitions: what a partition takes from one of
another process is received before the partition computes, and what goes to another process is sent behind it. Skips go
straight from the process that stashes them to the process that pops them. Gradients go back the same ways, see
`RemoteCell`:

    rank 0    F(0,0) ══►          F(1,0) ══►          ══► B(0,0)
    rank 1              ══► F(0,1) B(0,1) ══►   ══► F(1,1) ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.cell.cell import Arrival, Source
from torchgpipe.cell.layers_cell import LayersCell
from torchgpipe.devices.typing import Leaf
from torchgpipe.drive.agenda import Agenda
from torchgpipe.drive.executor import Executor
from torchgpipe.drive.step import LastCell, MicroBatches
from torchgpipe.frames.remote_cell import RemoteCell
from torchgpipe.model.microbatch import Batch
from torchgpipe.offload.host_copies import Kept, resident
from torchgpipe.processes.processes import Processes
from torchgpipe.processes.stand_in import Form, form_of
from torchgpipe.processes.tags import TENSORS, tag_of
from torchgpipe.replay.random_numbers import Draws
from torchgpipe.schedule import Action, Program
from torchgpipe.schedule.programs import ScheduleName, program_of
from torchgpipe.skip.layout import SkipLayout

__all__ = ["Crossings", "RemoteMicroBatches", "part_of_program"]


@lru_cache(maxsize=32)  # Every step asks for its part.
def part_of_program(
    name: ScheduleName, m: int, owners: tuple[int, ...], rank: int, order: tuple[int, ...] | None
) -> Program:
    """Return the part of a program in one process, whose partitions count from 0 there.

    Args:
        name: the name of a schedule
        m: the number of micro-batches
        owners: the rank of each partition
        rank: the rank of the process
        order: see `program_of`
    """
    own = [j for j, owner in enumerate(owners) if owner == rank]
    return ([Action(kind, i, own.index(j)) for kind, i, j in program_of(name, m, owners, order)[rank]],)


class Crossings(NamedTuple):
    """What a process knows of what crosses in a step.

    Attributes:
        processes: the processes
        skips: the skips between all partitions
        forms: for each micro-batch, its input and the outputs of all partitions
    """

    processes: Processes
    skips: SkipLayout
    forms: Sequence[Sequence[Batch]]


class RemoteMicroBatches(MicroBatches):
    """See `MicroBatches`. There, j counts the partitions of this process.

    Args:
        crossings: what crosses
        others: the arguments of `MicroBatches`
    """

    _layout: SkipLayout

    def __init__(self, crossings: Crossings, *others: Any) -> None:
        self._processes, skips, self._forms = crossings
        self._last = len(self._processes.owners) - 1
        self._stages = [j for j in range(self._last + 1) if self._processes.is_mine(j)]
        self._layout = skips.part(self._stages)
        super().__init__(*others)

    def _new_cell(self, i: int, j: int) -> LayersCell:
        column = self.columns[j]
        if self._stages[j] == self._last:
            return _RemoteLastCell(self._processes, i, column, self._finish, self._backward)
        return _RemoteLayersCell(self._processes, i, column)

    def run(self, executor: Executor, agenda: Agenda) -> None:
        """See `MicroBatches.run`; all processes know the same of what the model draws from."""
        executor.run(agenda, self.ambient)
        if not self._random_numbers.is_known:
            for drawn in self._processes.gather(tuple(self._random_numbers.drawn), "what the layers draw from"):
                self._random_numbers.also(Draws(*drawn))
        self._end()

    def forward(self, i: int, j: int, *, recomputes: bool) -> None:
        """See `Front.forward`."""
        stage = self._stages[j]
        self._receive(i, j, stage)
        numbers = self._random_numbers
        draws = numbers.following(self.columns[j].stream.device)  # As in all other processes.
        if draws:
            self._processes.take_numbers(numbers.state(i), i, stage)
        super().forward(i, j, recomputes=recomputes)
        if draws:
            self._processes.leave_numbers(numbers.state(i), i, stage)
        cell: Any = self._cells.get((i, j))  # None without backward.
        for number, (_, arrival) in enumerate(cell.sources if cell else ()):
            if isinstance(arrival, _Received):
                cell.note_received(arrival.home, arrival.form, number)
        for target, leaves, forms in self._leaving(i, j, stage):
            self._send(i, stage, target, leaves, forms, cell)

    def _receive(self, i: int, j: int, stage: int) -> None:
        """Receive what other processes send to a cell."""
        form = self._forms[i][stage]
        if stage > 0 and not self._processes.is_mine(stage - 1):
            received = [self._received(i, stage - 1, stage, leaf) for leaf in form.leaves]
            self._values[i, j] = form.replace(()), [leaf for leaf, _ in received], [source for _, source in received]
        for key, source, _ in self._layout.arriving[j]:
            if not self._processes.is_mine(source):
                self._skips[i, key] = self._received(i, source, stage, (form.skips or {})[key])

    def _received(self, i: int, home: int, stage: int, fake: Leaf) -> tuple[Leaf, Source | None]:
        """Receive a tensor from partition ``home``, and return it with where its gradient goes."""
        if fake is None:
            return None, None
        form, owner = form_of(fake), self._processes.owners[home]
        with self._processes.exchanging(f"the input of micro-batch {i}", [owner]):
            tensor = self._processes.messages.receive(form, owner, self._tag(i, home, stage))
        records = fake.requires_grad and self._backward
        return tensor.requires_grad_(records), (None, _Received(home, form)) if records else None

    def _leaving(self, i: int, j: int, stage: int) -> Iterator[tuple[int, list[tuple[Kept, Any]], Sequence[Leaf]]]:
        """Yield what a cell has left for partitions of other processes: their numbers, tensors with exports, forms."""
        if stage == self._last:
            return
        form = self._forms[i][stage + 1]
        if not self._processes.is_mine(stage + 1):
            output, leaves, sources = self._values.pop((i, j + 1))
            if output.spec != form.spec:
                raise self._differs(i, stage, f"has the structure {output.spec}, and not {form.spec}")
            yield stage + 1, [*zip(leaves, sources)], form.leaves
        for key, _, target in self._layout.leaving[j]:
            if not self._processes.is_mine(target):
                yield target, [self._skips.pop((i, key))], [(form.skips or {})[key]]

    def _send(
        self, i: int, stage: int, target: int, leaves: Sequence[tuple[Kept, Any]], forms: Sequence[Leaf], cell: Any
    ) -> None:
        """Send tensors to a partition of another process, and note that their gradients come back."""
        for (kept, source), fake in zip(leaves, forms, strict=True):
            (leaf,) = resident([kept])
            if leaf is None or fake is None:
                if leaf is not fake:
                    raise self._differs(i, stage, "has None in other places")
                continue
            form, own = form_of(fake), form_of(leaf)
            # A cell that runs again does not know yet which of its outputs have a gradient.
            records = fake.requires_grad and self._backward
            if (own.shape, own.dtype) != (form.shape, form.dtype) or (records and source is None):
                raise self._differs(i, stage, f"has a tensor {_shown(leaf)}, and not {_shown(fake)}")
            if own.stride != form.stride:
                leaf = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device).copy_(leaf)
            self._processes.messages.send(leaf, self._processes.owners[target], self._tag(i, stage, target))
            if records:
                cell.note_sent(target, source[1], form)

    def _differs(self, i: int, stage: int, what: str) -> RuntimeError:
        return RuntimeError(
            f"the output of stage {stage} for micro-batch {i} {what}, which was expected from the shapes of the input; "
            "let the shapes that a stage returns depend on these shapes alone"
        )

    def _tag(self, i: int, a: int, c: int) -> int:
        return tag_of(TENSORS, i, a * (self._last + 1) + c)


class _Received(Arrival):
    """Where the gradient of a tensor arrives that was received: its cell sends it back to column ``home``."""

    __slots__ = ("form", "home")

    def __init__(self, home: int, form: Form) -> None:
        super().__init__()
        self.home, self.form = home, form


class _RemoteLayersCell(RemoteCell, LayersCell):
    pass


class _RemoteLastCell(RemoteCell, LastCell):
    pass


def _shown(tensor: Tensor) -> str:
    shape, _, dtype, _ = form_of(tensor)
    return f"of shape {shape} and {dtype}{' with a gradient' * tensor.requires_grad}"
