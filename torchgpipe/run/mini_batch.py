"""A mini-batch in frames: its cells, forward and backward, in the order of a program.

In the program, j is a column. F(i, j) lets frame i go on until its model leaves column j. B(i, j) differentiates the
cell, and gives the gradients of its imports to the cells that they come from.

`step` runs the whole program. For ``loss.backward()``, the program is that of GPipe, and runs in two halves: all F when
the model is called, all B in the backward of one autograd node; see `outer`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.batch.inputs import Arguments
from torchgpipe.cell.cell import Arrival, Cell, Export
from torchgpipe.cell.out_of_memory import MiniBatchFacts
from torchgpipe.devices.interrupts import uninterrupted
from torchgpipe.devices.torch_internals import forget_parametrizations, storage_key, versions
from torchgpipe.drive.agenda import Agenda, FrozenProgram, agenda_of
from torchgpipe.drive.executor import Executor
from torchgpipe.model.settings import checkpoint_stop
from torchgpipe.model.values import each
from torchgpipe.offload.residence import residence_of
from torchgpipe.replay.ambient import Ambient
from torchgpipe.run.carried import Carried
from torchgpipe.run.columns import Columns
from torchgpipe.run.frame import Frame
from torchgpipe.run.remote_cell import RemoteCell
from torchgpipe.run.remote_frame import RemoteFrame
from torchgpipe.run.threads import Threads
from torchgpipe.run.visitors import RecomputationVisitor
from torchgpipe.schedule import Action, Program
from torchgpipe.schedule.action import Kind as ActionKind
from torchgpipe.schedule.action import with_recomputation
from torchgpipe.spine.door import visiting
from torchgpipe.spine.glue import explain_compiler
from torchgpipe.spine.weights import add_shared
from torchgpipe.transport.route import mark_ready

__all__ = ["Finish", "MiniBatch"]

#: The frames that may be under way beside those that a program needs, as workers are never equally fast.
SPARE = 1

#: Takes a micro-batch's number, the output of the model, and a function that exports a tensor to the caller; None if no
#: backward follows.
Finish = Callable[[int, Any, Callable[[Tensor], Export] | None], None]


class MiniBatch:
    """The frames and cells of a mini-batch.

    Args:
        forward: the model's own forward
        model: names the model's forward, for errors
        inputs: the arguments of each micro-batch, on the first device
        finish: takes the output of each micro-batch, in the last column
        columns: the columns, and what the frames share
        program: the actions of each device
        backward: whether backward follows
        verified: called when all actions were verified to have no operation that the pipeline has not seen, and no
            change of weights that live in host memory; None if there is no need
        facts: what a note about memory is made from
        carried: what the micro-batches hand on, if they are chunks of one sequence

    Attributes:
        aliases: the aliases of the model's parameters
        columns: the columns
        random_numbers: the random numbers
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        model: str,
        inputs: Sequence[Arguments],
        finish: Finish,
        columns: Columns,
        program: Program,
        *,
        backward: bool,
        verified: Callable[[], None] | None,
        facts: MiniBatchFacts,
        carried: Carried | None,
    ) -> None:
        self.columns, self.aliases = columns, columns.aliases
        self._m, self._n = len(inputs), len(columns)
        self.random_numbers = columns.random_numbers
        streams = [column.stream for column in columns]
        # Each column is a partition by itself.
        self._residence = residence_of(
            self.aliases, streams, range(self._n), columns.listener, watches=verified is not None
        )
        self._verified = verified or (lambda: None)
        self._facts = facts
        self._model = model
        self._forward: Callable[..., Any] | None = forward
        self._inputs: list[Arguments | None] = list(inputs)
        self._carried = carried
        self._finish: Finish | None = finish
        #: By micro-batch. Those that have been differentiated, and will not be again, are None.
        make = Cell if columns.processes is None else partial(RemoteCell, columns.processes)
        cells = [[make(i, column) for column in columns if backward] for i in range(self._m)]
        self._cells: list[list[Cell | None]] = [[*of_frame] for of_frame in cells] if backward else []
        self._verifies = verified is not None
        #: The tensors among the caller's arguments, with their versions.
        self._callers: list[tuple[weakref.ref[Tensor], int]] = []
        mine = tuple(map(columns.is_mine, range(self._n)))
        # A frame stops only where a column of this process begins, so one column needs no threads.
        self._threads = Threads() if sum(mine) > 1 else None
        kind, ambient = Frame if columns.processes is None else RemoteFrame, Ambient()
        self._frames = [
            kind(i, self._run_frame, ambient, self._threads, columns, cells[i], self._residence, carried)
            for i in range(self._m)
        ]
        #: For each micro-batch, the inputs that require grad, with where their gradients arrive, and their imports.
        self._entered: list[list[tuple[Tensor, Arrival, Tensor]]] = [[] for _ in inputs]
        # The last column waits for no gradient. Weights that are in host memory come for backward alone.
        ahead = columns.recomputed - {self._n - 1} if not self._residence.has_copies else set[int]()
        counts = [self._m if j in ahead else 0 for j in range(self._n)]
        keeps = columns.has_stages
        if keeps:
            counts = [checkpoint_stop(columns.checkpoint, self._m)] * self._n
        #: Returns the actions of this process that are of some kinds.
        self._agenda = partial(
            _agenda_of, tuple(map(tuple, program)), mine, tuple(counts), keeps=keeps, backward=backward
        )
        #: Of each micro-batch, what has crossed between processes; None until its forward has ended.
        self.crossings: list[Any] = [None] * self._m

    # ------------------------------------------------------------------------------------------------- the program

    def _execute(self, agenda: Agenda, *, keep_graph: bool = False) -> None:
        one = self.random_numbers.are_of_the_process  # As in a proof, which knows of no model what it draws from.
        executor = Executor(self, Ambient(), self._facts, self._residence, in_one_thread=one)
        executor.run(agenda, keep_graph=keep_graph)

    def run(self) -> None:
        """Run the whole program.

        Raises:
            BaseException: the error of the first action that failed, with a note of where it was.
        """
        try:
            self._execute(self._agenda("FRBIW"))
            self._verified()
        finally:
            self._drop()

    def run_forward_half(self) -> None:
        """Run all forward actions."""
        try:
            self._execute(self._agenda("F"))
            self._end_pauses()
            if not self._cells:
                self._verified()
        finally:
            self._drop()

    def run_columns_forward(self, after: Callable[[int], None]) -> None:
        """Run all forward actions, in this thread, column by column, and call ``after`` with each column."""
        try:
            for j in filter(self.columns.is_mine, range(self._n)):
                self._execute(Agenda([Action("F", i, j) for i in range(self._m)], []))
                after(j)
            self._end_pauses()
        finally:
            self._drop()

    def run_columns_backward(self, after: Callable[[int], None], *, split: bool) -> None:
        """Run all backward actions, in this thread, column by column, and call ``after`` with each column."""
        with self.aliases.installed():
            kinds: Sequence[ActionKind] = ("I", "W") if split else ("B",)
            for j in filter(self.columns.is_mine, reversed(range(self._n))):
                actions = [Action(kind, i, j) for i in reversed(range(self._m)) for kind in kinds]
                self._execute(Agenda(actions, []))
                after(j)
        self._verified()

    def _end_pauses(self) -> None:
        """Let frames go on to their ends that have passed the last column of this process."""
        try:
            for frame in self._frames:
                frame.end_pause()
        except BaseException:
            uninterrupted(self.cancel)
            raise

    def cancel(self) -> None:
        """See `Front.cancel`."""
        for frame in self._frames:
            frame.cancel()

    def _drop(self) -> None:
        """Forget what only forward needs: frames refer back to this object, and ``finish`` to the outputs."""
        if self._threads is not None:
            self._threads.close()
        self._frames, self._forward, self._finish = [], None, None
        # Of aliases that no later mini-batch has. The model may enter autocast and cached() itself, in any frame.
        torch.clear_autocast_cache()
        forget_parametrizations()

    def run_backward_half(self, *, keep_graph: bool) -> None:
        """Run all backward actions, in the thread of an autograd node.

        Raises:
            RuntimeError: an input has been changed since forward.
        """
        for ref, version in self._callers:
            tensor = ref()
            if tensor is not None and versions([tensor]) != [version]:
                raise RuntimeError(
                    f"an input of shape {tuple(tensor.shape)} of a pipelined model was changed in place after forward, "
                    "so backward would compute with other values; change a copy, or call backward() before"
                )
        for j in range(self._n):
            self.aliases.verify_unchanged(j)
        doors = self.columns.remote_doors
        with (
            self.aliases.installed(),
            self.random_numbers.callers_generator.kept(),
            nullcontext() if doors is None else doors.processes.at_backward(),
        ):
            self._execute(self._agenda("BIW" if keep_graph else "RBIW"), keep_graph=keep_graph)
            if doors is not None:
                add_shared(doors.users, self.aliases, doors.processes)
        self._verified()
        # An engine thread has streams of its own, on which the gradients go on.
        for column in self.columns:
            self.columns.streams.current(column.stream.device).wait(column.stream.mark())

    def watch_inputs(self, inputs: Any) -> None:
        """Note the versions of the caller's tensors whose memory backward uses; of others there is a copy."""
        streams, first = self.columns.streams, self.columns.devices[0]
        self._callers = [
            (weakref.ref(tensor), versions([tensor])[0])
            for _, tensor in each(inputs, objects=True)
            if (device := streams.device_of(tensor)) is None or not streams.moves(device, first)
        ]

    def leaves(self) -> Iterator[Tensor]:
        """Yield the leaves that the graphs of all cells end in."""
        for cells in self._cells:
            for cell in cells:
                if cell is not None:
                    yield from cell.leaves()

    def inputs_with_grad(self) -> list[tuple[Tensor, Arrival]]:
        """Return the inputs that require grad, each a part of an argument, with what their gradients arrive at."""
        return [(tensor, source) for entered in self._entered for tensor, source, _ in entered]

    # ----------------------------------------------------------------------------------------------------- forward

    def forward(self, i: int, j: int, *, recomputes: bool) -> None:
        """See `Front.forward`; modules of the model's own recompute, and nobody can tell them not to."""
        frame = self._frames[i]
        frame.recomputes = recomputes or not self.columns.has_stages
        forget_parametrizations()  # A weight that another micro-batch has computed is a part of that one's graph.
        try:
            with self._numbers_passed_on(i, j), self.random_numbers.of(i, self.columns.devices[j]):
                frame.advance(j)
            mark_ready(self.columns[j].leaving, i)
        except BaseException as error:
            inside = f"'{frame.module}'" if frame.module else self._model
            explain_compiler(error)
            where = self.columns[frame.column].where
            error.add_note(f"micro-batch {i} of {self._m}, {where}, in {inside}, during forward")
            raise

    @contextmanager
    def _numbers_passed_on(self, i: int, j: int) -> Iterator[None]:
        """Take over the states of generators that another process has left, and leave them to the next one.

        A frame leaves them when it leaves the column: it may have to wait for the next one further on.
        """
        columns, numbers, frame = self.columns, self.random_numbers, self._frames[i]
        processes = columns.processes
        if processes is None or not isinstance(frame, RemoteFrame) or not numbers.following(columns.devices[j]):
            yield
            return
        if j and not columns.is_mine(j - 1):
            states = processes.receive(
                processes.owners[j - 1], f"numbers {i} {j}", f"the random state of micro-batch {i}"
            )
            numbers.state(i).update(states)
        yield
        frame.hand_on_numbers(j, numbers.state(i))

    def _run_frame(self, frame: Frame) -> None:
        i = frame.i
        cells = [cell for cell in self._cells[i] if cell is not None] if self._cells else []
        taken, self._inputs[i] = self._inputs[i], None
        assert taken is not None
        arguments = [taken.mapped(lambda tensor: self._cut(i, tensor)) if cells else taken]
        del taken  # The model alone holds its arguments.
        if self._residence.has_copies:
            frame.callers = {storage_key(tensor) for _, tensor in each(tuple(arguments[0]))}

        def model() -> Any:
            assert self._forward is not None
            args, kwargs = arguments.pop()
            if self._carried is not None:
                kwargs = {**kwargs, "past_key_values": self._carried.cache(i)}
            return self._forward(*args, **kwargs)

        def finish(output: Any) -> None:
            assert self._finish is not None
            self.aliases.verify_returned((tensor for _, tensor in each(output)), f"micro-batch {i} of the model")
            output = frame.import_value(output)
            self._finish(i, output, cells[-1].export if cells else None)
            if isinstance(frame, RemoteFrame):
                self.crossings[i] = frame.imports.log

        # Here, too: in a thread of its own, a frame does not run in the modes of a worker.
        with self._residence.watched(lambda: frame.column):
            frame.run(model, finish)
        for j, cell in enumerate(cells if self._verifies else []):
            cell.span = frame.imports.span(j)

    def _cut(self, i: int, tensor: Tensor) -> Tensor:
        """Return an input of micro-batch ``i``, without its history if it requires grad."""
        if not tensor.requires_grad:
            return tensor
        for entered, _, import_ in self._entered[i]:
            if entered is tensor:
                return import_
        source = Arrival()
        first = self._cells[i][0]
        assert first is not None
        import_ = first.import_(tensor.detach(), (None, source))
        self._entered[i].append((tensor, source, import_))
        return import_

    # ---------------------------------------------------------------------------------------------------- backward

    def recompute(self, i: int, j: int) -> None:
        """See `ProgramFront.recompute`. Modules that have not run again do so when their backward comes."""
        cell = self._cells[i][j]
        assert cell is not None
        # With the module that backward begins with, no more is alive than without R, and a plan counts on that. From
        # another process the gradient takes longer.
        first = cell.second_runs if self.columns.processes is not None else cell.second_runs[-1:]
        with visiting(RecomputationVisitor(self.columns, j)):
            for ref in reversed(first):
                run_again = ref()
                if run_again is not None:
                    with cell.told("recomputation"):
                        run_again()

    def cell(self, i: int, j: int, *, last: bool) -> Cell | None:
        """See `ProgramFront.cell`."""
        if self._frames:
            self._frames[i].end_pause()  # It may have to send what its gradient comes back for.
        cell = self._cells[i][j]
        if last:
            self._cells[i][j] = None
        return cell

    @contextmanager
    def differentiating(self, j: int) -> Iterator[None]:
        """See `ProgramFront.differentiating`."""
        with visiting(RecomputationVisitor(self.columns, j)), self.aliases.filled(j):
            yield


@lru_cache(maxsize=32)
def _agenda_of(
    program: FrozenProgram, mine: tuple[bool, ...], counts: tuple[int, ...], kinds: str, *, keeps: bool, backward: bool
) -> Agenda:
    """Return the actions of this process that are of some kinds.

    No more frames are under way than the program needs, and one to spare: a frame that comes later begins when an
    earlier one has ended, and takes over its thread. Without that, the first worker could begin all frames at once,
    each with a thread and with what a thread takes of each device's memory. The agenda is in the order of time, so what
    an action waits for does not wait for the action. In each column, modules of the first ``counts`` micro-batches run
    again before their gradients are there; for ``keeps``, see `with_recomputation`.
    """
    n = len(mine)
    program = tuple(map(tuple, with_recomputation(program, counts, keeps=keeps)))
    agenda = agenda_of(program, tuple((j,) for j in range(n)), (False,) * n, backward=backward)
    needs, ended = [list(numbers) for numbers in agenda.needs], deque[int]()
    for number, (kind, _, j) in enumerate(agenda.actions):
        if kind == "F" and j == 0 and len(ended) > SPARE:
            needs[number].append(ended.popleft())
        if kind == "F" and j == n - 1:
            ended.append(number)
    # What the actions of this part need of others has run, or comes in messages.
    is_in_it = [mine[action.j] and action.kind in kinds for action in agenda.actions]
    needed: list[set[int]] = []
    for wanted in needs:  # What an action of another part needs, those need that need the action.
        needed.append(set().union(*[{number} if is_in_it[number] else needed[number] for number in wanted]))
    numbers = [number for number, is_in in enumerate(is_in_it) if is_in]
    new = {number: k for k, number in enumerate(numbers)}
    return agenda._replace(
        actions=[agenda.actions[number] for number in numbers],
        needs=[sorted([new[need] for need in needed[number]]) for number in numbers],
    )
