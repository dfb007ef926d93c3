"""A frame whose columns are in several processes.

Every process runs the model's own forward for each micro-batch. A module of its own columns computes; in the place of
what another process computes, there are stand-ins, and all operations between the modules run everywhere. A tensor is
*replicated* if all processes have its values, such as an input or a mask made of it; else it is *owned* by the column
that has computed it, its home:

    process 0        x ──► block 0 ──► h ······► (block 1) ──► stand-in        h is sent when block 1 is reached
                                       │
    process 1        x ──► (block 0) ──► stand-in ══► block 1 ──► y            and received there, in its place

So both ends of a crossing find it at the same place of the same forward, under the same number: nothing is negotiated.
A frame stops where a column of its own process begins, and passes the others by. What a process tells of its modules,
others may come to before it has: there a frame pauses, see `Inbox`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakIdKeyDictionary

from torchgpipe.cell.cell import Cell
from torchgpipe.devices.torch_internals import is_checkpointed
from torchgpipe.model.values import Exchanged, each, mapped, put_in_place
from torchgpipe.processes.stand_in import NoValues, StandIn, computed_as_a_whole, form_of
from torchgpipe.run.columns import Columns
from torchgpipe.run.frame import Frame
from torchgpipe.run.imports import Imports
from torchgpipe.run.kept import put_values, values_of
from torchgpipe.run.reads import DRAWS, MASKS, READS, SHAPE_ONLY, reads_values
from torchgpipe.run.remote_cell import RemoteCell
from torchgpipe.run.threads import place_of
from torchgpipe.spine.abstract import Abstract, abstracted
from torchgpipe.spine.door import Door, this_thread
from torchgpipe.spine.glue import DIFFERENTIATES, OF_A_PLACE, OF_THE_ORIGINAL, TO_A_DEVICE, changes_in_place, on_device

__all__ = ["RemoteFrame"]


class RemoteImports(Imports):
    """See `Imports`. What one frame imports into its columns, and sends to those of other processes.

    Attributes:
        processes, doors: the processes, and their modules
        are_owned: whether any tensor since this was reset is owned by a column
        log: what has crossed between two processes, by its number
    """

    def __init__(self, i: int, cells: list[Cell], columns: Columns) -> None:
        super().__init__(i, cells, columns)
        assert columns.remote_doors is not None
        self.doors, self.processes = columns.remote_doors, columns.remote_doors.processes
        self.are_needed, self.are_owned = True, False
        self.log: list[str] = []
        #: Who has a tensor is no matter of the tensor: other frames meet it, as a constant of the model's file, anew.
        #: The columns that own tensors without a node of autograd.
        self._homes: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        #: The ranks that tensors were sent to: a module may return one tensor to several.
        self._sent: MutableMapping[Tensor, set[int]] = WeakIdKeyDictionary()
        #: The values that were received for stand-ins.
        self._received: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        #: By their ids, replicated tensors that a remote column has changed in place, with their stand-ins.
        self._replaced: dict[int, tuple[Tensor, StandIn]] = {}

    @property
    def begin_here(self) -> bool:
        """See `Imports.begin_here`: column 0 may be that of another process."""
        return True

    def end(self) -> None:
        """See `Imports.end`."""
        super().end()
        self._replaced = {}

    def own(self, value: Any, column: int) -> None:
        """Note that a column owns the tensors in a value."""
        for _, tensor in each(value):
            if isinstance(tensor, StandIn):
                tensor.home = column
            elif tensor.grad_fn is None:
                self._homes[tensor] = column

    def replaced(self, tensor: Any) -> Any:
        """Return the stand-in of a replicated tensor that a remote column has changed; else the tensor."""
        return self._replaced[id(tensor)][1] if id(tensor) in self._replaced else tensor

    def replace(self, tensor: Tensor) -> StandIn:
        """Let a remote column own a replicated tensor from now on, and return its stand-in."""
        stand_in = StandIn(form_of(tensor), self.column, tensor.requires_grad)
        self._replaced[id(tensor)] = tensor, stand_in
        return stand_in

    def note(self, crossing: str) -> int:
        """Note what crosses, and return its number."""
        self.log.append(crossing)
        return len(self.log) - 1

    def home_of(self, tensor: Tensor) -> int | None:
        """Return the column that owns a tensor, the present one of a parameter; None if it is replicated."""
        node = tensor.grad_fn
        users = self.doors.users.get(self._aliases.parameter_of(tensor)) if node is None else None
        if users is not None and self.column not in users:
            raise RuntimeError(
                f"{self._columns.name_of(self.column)} uses a parameter of shape {tuple(tensor.shape)}, and did not do "
                "so with the sample, so its process may not have it; give pipelined a sample that takes this way"
            )
        if users is not None:
            return self.column
        if isinstance(tensor, StandIn):
            return tensor.home
        if node is not None:
            home = self._home_of(tensor, node)
            if isinstance(node, BackwardCFunction) and not self._columns.is_mine(home):
                # Its values are here, and its node is older than the columns of this process.
                raise RuntimeError(
                    f"{node.name()} begins in partition {home} and ends in another process: one autograd Function "
                    "calls modules of both, as that of reversible layers does; give a balance that keeps them in one "
                    "process"
                )
            return home
        buffer = self.doors.buffers.get(id(tensor))
        return self._homes.get(tensor) if buffer is None else buffer[1]

    def import_tensor(self, tensor: Tensor) -> Tensor:
        """See `Imports.import_tensor`."""
        tensor = self.replaced(tensor)
        if self.home_of(tensor) is None:
            return self._on_this_device(tensor) if self._columns.is_mine(self.column) else tensor
        self.are_owned = True
        return super().import_tensor(tensor)

    def _brought(self, tensor: Tensor, records: bool) -> Tensor:
        column, home, owners = self.column, self.home_of(tensor), self.processes.owners
        is_parameter = tensor.grad_fn is None and self._aliases.parameter_of(tensor) in self.doors.users
        assert home is not None
        if owners[home] != owners[column]:
            return self._cross(tensor, home, records)
        if not self._columns.is_mine(column):
            is_here = home == column and not is_parameter
            requires_grad = tensor.requires_grad if is_parameter else records
            return tensor if is_here else StandIn(form_of(tensor), column, requires_grad)
        if is_parameter:
            alias = self._aliases.at(tensor, column)
            return tensor if alias is None else alias
        has_graph = home != column and tensor.grad_fn is not None
        return self._import(tensor, home, records) if has_graph else self._on_this_device(tensor)

    def _cross(self, tensor: Tensor, home: int, records: bool) -> Tensor:
        """Return what stands in this column for a tensor of another process, at both ends of its way and elsewhere."""
        processes, column, form = self.processes, self.column, form_of(tensor)
        source, target = processes.owners[home], processes.owners[column]
        number = self.note(f"{form.shape} {form.dtype}{' with a graph' * records} from partition {home} to {column}")
        if target == processes.rank:
            value = self._receive(tensor, source, number)
            if not records:
                self.own(value, column)
                return value
            cell = cast(RemoteCell, self._cells[column])
            return cell.import_(value, cell.note_received(home))
        if source == processes.rank:
            self._send(tensor, target, number)
            if records:
                cast(RemoteCell, self._cells[home]).note_sent(column, tensor)
        return StandIn(form, column, records)

    def _send(self, tensor: Tensor, target: int, number: int) -> None:
        """Send a tensor, unless it was sent there before, for another column."""
        sent = self._sent.setdefault(tensor, set())
        if target not in sent:
            sent.add(target)
            self.processes.send([tensor], [target], f"tensor {self.i} {number}", "tensors")

    def _receive(self, tensor: Tensor, source: int, number: int) -> Tensor:
        """Return the values of a stand-in, which are received for the first column of this process that uses them."""
        value = self._received.get(tensor)
        if value is None:
            what = f"a tensor of shape {tuple(tensor.shape)} of micro-batch {self.i} for partition {self.column}"
            device = self._columns.devices[self.column]
            (value,) = self.processes.receive(source, f"tensor {self.i} {number}", what, device=device)
            assert value is not None
            self._received[tensor] = value
        if is_checkpointed() and isinstance(tensor, StandIn):  # Which holds the stand-in until backward.
            tensor.kept = value
        return self._on_this_device(value)


class RemoteFrame(Frame):
    """See `Frame`."""

    imports: RemoteImports
    kind_of_imports = RemoteImports

    #: The last column that may run. What other processes have is passed by, before it and behind it.
    _granted = -1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: The columns behind which states of generators were handed on.
        self._handed_on: set[int] = set()
        self._inbox = self.imports.processes.messages.inbox

    def advance(self, j: int) -> None:
        """See `Frame.advance`."""
        self.end_pause(j)
        if self.column <= j:  # Else it has passed column j by, and may have paused behind it.
            self._granted = j
            super().advance(j)
            self.end_pause(j)

    def end_pause(self, j: int | None = None) -> None:
        """See `Frame.end_pause`; what comes behind column ``j`` may wait."""
        self._inbox.end_pause(self, lambda: j is not None and self.column > j)

    def cancel(self) -> None:
        """See `Frame.cancel`."""
        self._inbox.cancel(self)
        super().cancel()

    def _hear(self, source: int, key: str, what: str, *, keeps: bool = False) -> Any:
        """Return what another process tells, and pause until it has, unless this process has nothing else to do."""
        return self.imports.processes.receive(source, key, what, wait=self._wait, keeps=keeps)

    def _wait(self, is_told: Callable[[], bool]) -> None:
        if self._coroutine is None:
            self._inbox.until(is_told)
        elif not is_told():
            self._inbox.pause(self, is_told, self._go_on)
            self._coroutine.pause()

    def _go_on(self) -> None:
        """Let the model go on behind what it has been told, whatever micro-batch is under way here."""
        assert self._coroutine is not None
        try:
            self._coroutine.resume(self._go)
        except BaseException as error:
            error.add_note(f"micro-batch {self.i}, behind '{self.module}', which another process has")
            raise

    def hand_on_numbers(self, j: int, states: dict[int, Tensor]) -> None:
        """Leave the states of generators behind column ``j`` to the process of the next one, unless that was done."""
        if j not in self._handed_on:
            self._handed_on.add(j)
            processes = self.imports.processes
            if j + 1 < len(self._columns) and not self._columns.is_mine(j + 1):
                processes.send(dict(states), [processes.owners[j + 1]], f"numbers {self.i} {j + 1}")

    def go_to(self, column: int, name: str) -> None:
        """See `Frame.go_to`."""
        here = self.imports.column
        if column != here and self._columns.is_mine(here):
            states = self._columns.random_numbers.states_now(self._columns.devices[here])
            if states:
                self.hand_on_numbers(here, states)
        super().go_to(column, name)

    def _stops_before(self, column: int) -> bool:
        return self._columns.is_mine(column) and column > self._granted

    def _exchanged(self, args: Any, kwargs: Any) -> Exchanged:
        # A cache stays: each process has what its modules have put there.
        return Exchanged(args, kwargs, self.imports.import_tensor, caches=False)

    def _visit_here(self, door: Door, args: Any, kwargs: Any) -> Any:
        imports = self.imports
        if self._columns.is_mine(imports.column):
            return super()._visit_here(door, args, kwargs)

        def import_all(tensors: list[Tensor]) -> list[Tensor]:
            imported = [*map(imports.import_tensor, tensors)]
            self._import_caches(door, args, kwargs)
            return imported

        return imports.doors.pass_by(door, args, kwargs, imports.column, import_all, imports.replace, self._hear)

    def _call(self, door: Door, args: Any, kwargs: Any) -> Any:
        column, doors = self.imports.column, self.imports.doors
        called = doors.call(door, column, args, kwargs, partial(super()._call, door, args, kwargs))
        output, given, attributes = called.output, set(map(id, called.given)), values_of(door.module, called.attributes)
        self._verify_no_parameter(door, output)
        # Also what the module has put into a list or a dict that it was given, and what an attribute keeps.
        made = [one for _, one in each((output, args, kwargs, attributes), objects=True) if id(one) not in given]
        # The model may know a constant, as of its file, in other ways, too, in which all processes have it.
        aliases = {id(one): one.detach() for one in made if one.grad_fn is None and not one.requires_grad}

        def aliased(tensor: Tensor) -> Tensor:
            return aliases.get(id(tensor), tensor)

        put_in_place((args, kwargs), aliases)
        put_values(door.module, called.attributes, mapped(attributes, aliased))
        seen = [one for _, one in each(called.seen, objects=True) if id(one) not in given]
        self.imports.own([*map(aliased, made), *seen, *called.changed], column)
        return mapped(output, aliased, objects=True)

    def _verify_no_parameter(self, door: Door, output: Any) -> None:
        """Raise an error if a module returns a parameter which other processes have, too: there it is a stand-in."""
        for _, tensor in each(output, objects=True):
            if tensor.grad_fn is None and tensor.requires_grad:
                users = self.imports.doors.users.get(self._columns.aliases.parameter_of(tensor), frozenset())
                if not all(map(self._columns.is_mine, users)):
                    raise RuntimeError(
                        f"'{door.name}' returns a parameter of shape {tuple(tensor.shape)}, which the model uses in "
                        "another process: use the parameter itself there, or let the module return a view of it"
                    )

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling() or self._is_off or this_thread.visitor is not self:
            return func(*args, **kwargs)
        imports, devices = self.imports, self._columns.devices
        is_of_original = func in OF_THE_ORIGINAL and func not in READS
        if is_of_original or func in OF_A_PLACE:  # Else the question would send the tensor.
            return func(*map(imports.replaced, args), **kwargs)
        if "device" in kwargs or func in TO_A_DEVICE:
            args, kwargs = on_device(func, args, kwargs, devices[imports.column], devices)
        imports.are_owned = False
        first = args[0] if args else None
        args = mapped(args, imports.import_tensor)
        if kwargs:
            kwargs = mapped(kwargs, imports.import_tensor)
        if not imports.are_owned:
            if func in DRAWS and kwargs.get("generator") is None:
                return self._draw(func, args, kwargs, first)
            return func(*args, **kwargs)
        if func in DIFFERENTIATES:
            raise RuntimeError(
                "the model computes gradients between two modules of the spine, of what one process has; let one "
                "module do all of it"
            )
        if func in SHAPE_ONLY:
            like = torch.empty_strided(*form_of(args[0])[:2], dtype=args[0].dtype, device="meta")
            return func(like, *args[1:], **{**kwargs, "device": kwargs.get("device") or args[0].device})
        if reads_values(func, args, lambda mask: imports.home_of(mask) is not None):
            return self._read(func, args, kwargs)
        return self._compute(func, args, kwargs, first)

    def _compute(self, func: Callable[..., Any], args: Any, kwargs: Any, first: Any) -> Any:
        """Compute what the present column owns; ``first`` is the first argument before it was imported."""
        imports, is_mine = self.imports, self._columns.is_mine(self.imports.column)
        if func is Tensor.__getitem__ and not is_mine:
            args = args[0], _by_numbers(args[1])
        if not changes_in_place(func) and not kwargs.get("inplace", False):
            try:
                result = func(*args, **kwargs)
            except NoValues:
                result = computed_as_a_whole(func, args, kwargs)
            # What all processes have stays replicated, as class weights that are where they are to go.
            if not (any([result is one for one in args]) and imports.home_of(result) is None):
                imports.own(result, imports.column)
            return result
        if is_mine or isinstance(args[0], StandIn):
            changed = args[0]
        else:
            changed = imports.replace(args[0])
            args = changed, *args[1:]
        if is_mine:
            result = func(*args, **kwargs)
        else:  # A leaf that requires grad may not be changed in place, and a stand-in needs no graph.
            with torch.no_grad():
                result = func(*args, **kwargs)
            requires_grad = torch.is_grad_enabled() and any([one.requires_grad for _, one in each((args, kwargs))])
            changed.requires_grad_(changed.requires_grad or requires_grad)
        imports.own(changed, imports.column)
        return first if result is changed and first is not args[0] and id(first) in imports._replaced else result

    def _draw(self, func: Callable[..., Any], args: Any, kwargs: Any, first: Any) -> Any:
        """Draw random numbers where the present column is, which goes on with those of its micro-batch.

        A single number, as layer drop draws to decide what runs, is the same in all processes: it has a stream of its
        own, or each would wait for the last column at each layer.
        """
        column, result, originals = self.imports.column, None, dict[int, Tensor]()
        if next(each((args, kwargs)), None) is None:
            result = func(*args, **{**kwargs, "device": "meta"})
            if result.numel() == 1:
                if self._columns.is_mine(column):
                    func(*args, **kwargs)  # One process takes it from the numbers of the micro-batch.
                with self._columns.random_numbers.replicated(self.i):
                    return func(*args, **kwargs)
        if self._columns.is_mine(column) or changes_in_place(func):
            return self._compute(func, args, kwargs, first)
        if result is not None:
            device = torch.device(kwargs.get("device") or torch.get_default_device())
            return StandIn(form_of(result)._replace(device=device), column, result.requires_grad)

        def stand_in(tensor: Tensor) -> StandIn:
            made = StandIn(form_of(tensor), column, tensor.requires_grad)
            originals[id(made)] = tensor
            return made

        result = func(*mapped(args, stand_in), **mapped(kwargs, stand_in))
        return originals.get(id(result), result)

    def _read(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Let the owner of the column read values, and tell all others."""
        imports, processes, column = self.imports, self.imports.processes, self.imports.column
        number = imports.note(f"what '{func.__name__}' reads in partition {column}")
        key, owner = f"value {self.i} {number}", processes.owners[column]
        self._columns.reads.setdefault(place_of(threading.get_ident()), func.__name__)
        if owner == processes.rank:
            result = func(*args, **kwargs)
            processes.send(abstracted(result), processes.others, key)
            imports.own(result, column)
            return result
        told: Abstract = self._hear(owner, key, f"a value that '{func.__name__}' reads in micro-batch {self.i}")
        return told.made((), column, self._columns.devices[column])


def _by_numbers(index: Any) -> Any:
    """Return an index with numbers in the place of masks whose values are here: those tell the shape of the result."""
    found: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, Tensor) and part.dtype in MASKS and not isinstance(part, StandIn)
        found += part.nonzero(as_tuple=True) if is_mask else [part]
    return tuple(found)
