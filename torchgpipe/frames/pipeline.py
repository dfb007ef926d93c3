"""Running a pipelined module: a mini-batch through `forward`, through `step`, or in one piece."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices.stream import Streams
from torchgpipe.devices.torch_internals import caches_parametrizations, has_call_hooks, is_checkpointed
from torchgpipe.engine.aliases import Aliases, Slot, weights_of
from torchgpipe.engine.delivery import with_gradients
from torchgpipe.engine.function import refuse_transforms
from torchgpipe.engine.host_memory import HostMemory
from torchgpipe.engine.label import labelled
from torchgpipe.engine.out_of_memory import MiniBatchFacts
from torchgpipe.engine.record import Place, Recorder
from torchgpipe.engine.residence import OnDemand
from torchgpipe.frames.cell import Export
from torchgpipe.frames.columns import Columns, copier
from torchgpipe.frames.door import Door, Owner, put_door, remove_door
from torchgpipe.frames.exported import Exported
from torchgpipe.frames.inputs import Arguments, chunk_sizes
from torchgpipe.frames.loss import MicroBatchLoss, mean_or_sum
from torchgpipe.frames.mini_batch import Finish, MiniBatch
from torchgpipe.frames.move import move
from torchgpipe.frames.outputs import join
from torchgpipe.frames.settings import Settings
from torchgpipe.frames.visitors import InOnePiece, visiting
from torchgpipe.model.microbatch import tell_of_few
from torchgpipe.model.values import each, is_cache, mapped
from torchgpipe.model.verify import verify_compiled
from torchgpipe.replay.random_numbers import RandomNumbers, modes_of
from torchgpipe.schedule import Action, Program, Schedule, places_of, program, program_of

__all__ = ["Pipeline"]


class Pipeline:
    """What runs a pipelined module.

    Args:
        settings: the settings of the module

    Attributes:
        settings: the settings of the module
        identity: stands for this pipeline where a reference to it would be a cycle
        streams: the source of streams; a test can exchange it
        recorder: the listener to what runs when, if there is one
        host_memory: takes weights to devices, if they live in host memory
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.identity = Owner(self)
        self.streams = Streams()
        self.recorder: Recorder | None = None
        self._lock = threading.RLock()
        self._structure: tuple[Any, ...] = ()
        # Weakly, as the model is among them, and holds this object.
        self._doors: list[tuple[weakref.ref[nn.Module], str, int]] = []
        self._slots: list[tuple[weakref.ref[nn.Module], str, int]] = []
        #: Whether modules have hooks, which may see what they return.
        self._has_hooks = False
        #: What mini-batches there were whose graphs were looked at; see `Cell.verify_complete`.
        self._verified: set[Any] = set()
        self._told: set[str] = set()
        #: What mini-batches there were whose operations on weights were looked at; see `Watch`.
        self._watched: set[Any] = set()
        self.host_memory = HostMemory(*settings.offload) if settings.offload is not None else None
        self._begun = False

    def __reduce__(self) -> Any:
        """Leave this out of copies and pickles, which make their own."""
        return type(None), ()

    def forward(self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a mini-batch, and return its output, with one autograd node that stands for all of it."""
        settings, arguments = self.settings, Arguments(args, kwargs)
        self._verify(arguments)
        rows = settings.splitter.rows_of(arguments)
        if self._stays_whole(arguments, rows):
            return self._in_one_piece(module, plain, arguments)
        self._begin(arguments, rows, 7)  # the caller of the model
        sizes, parts = self.micro_batches(arguments, rows)
        named = [settings.splitter.names(part) for part in parts]
        backward = torch.is_grad_enabled()
        scalars = mean_or_sum(settings, named, sizes)
        parts = self._brought(arguments, rows, parts)
        exported = Exported(len(parts), backward=backward)
        actions = self._in_two_halves(len(parts))
        with self.aliased(module, backward=backward) as aliases:
            mini_batch = self._mini_batch(module, plain, parts, exported.take, aliases, actions, backward=backward)
            mini_batch.run_forward_half()
        mini_batch.watch_inputs(tuple(arguments))
        self._end(mini_batch, rows)
        outputs = exported.in_graph_of_caller(mini_batch, aliases)
        return join(outputs, sizes, settings.kinds[module.training], scalars)

    def step(
        self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], target: Any, kwargs: Any
    ) -> Any:
        """Run a mini-batch forward and backward under the schedule, and return its loss."""
        settings, arguments = self.settings, Arguments(args, kwargs)
        self._verify(arguments)
        rows = settings.splitter.rows_of(arguments)
        self._begin(arguments, rows, 4)  # the caller of step
        sizes, parts = self.micro_batches(arguments, rows)
        backward = torch.is_grad_enabled()
        named = [settings.splitter.names(part) for part in parts]
        bring = self.to(settings.devices[-1])
        loss = MicroBatchLoss(settings, named, sizes, target, bring, training=module.training)
        parts = self._brought(arguments, rows, parts)

        def finish(i: int, output: Any, export: Callable[[Tensor], Export]) -> None:
            value, weight = loss.of(i, output)
            if backward:
                if not value.requires_grad:
                    raise RuntimeError(
                        "the loss does not require grad, so there is nothing to train; does the output depend on a "
                        "parameter that requires grad?"
                    )
                export(value).add(torch.full_like(value, weight))

        actions = program_of(settings.schedule, len(parts), places_of(settings.devices))

        def work() -> Any:
            with aliases.installed():
                mini_batch = self._mini_batch(
                    module, plain, parts, finish, aliases, actions, backward=backward, schedule=settings.schedule
                )
                mini_batch.run()
                result = loss.result()
                self._end(mini_batch, rows)
                return result, mini_batch.take_input_gradients()

        with self._lock:
            aliases = self.aliases(module, backward=backward)
            return with_gradients(aliases, work)

    def call_outside(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Call a module of the spine on its device, and bring what it returns to where its arguments were.

        So methods of the model beside forward run on several devices, as far as they call modules of the spine.
        """
        devices, streams = self.settings.devices, self.streams
        own = devices[door.column]
        if self.host_memory is not None:
            return self._call_from_host_memory(door, args, kwargs)
        given = [there for _, tensor in each((args, kwargs)) if (there := streams.device_of(tensor)) is not None]
        if not any([streams.moves(there, own) for there in given]):
            return door.call_module(args, kwargs)
        with streams.current(own).use():
            output = door.call_exchanged(args, kwargs, self.to(own))
        # What is on none of the devices, such as a batch on the host, stays on the first device that it comes to.
        return mapped(output, self.to(given[0])) if given[0] in devices else output

    def _call_from_host_memory(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Call a module of the spine while its weights are on its device, without a graph."""
        modules, column = list(door.module.modules()), door.column
        trained = [one for child in modules for one in child._parameters.values() if one is not None]
        if torch.is_grad_enabled() and any([one.requires_grad for one in trained]):
            raise RuntimeError(
                f"'{door.name}' is called outside of the model's forward, where nothing brings its weights back from "
                "host memory for backward; call it in torch.no_grad(), or call the model"
            )
        slots = [(child, name, column) for child in modules for name in child._parameters]
        columns = Columns(self.settings.devices, self.streams)
        with self._lock:
            aliases = self._aliases_of(slots, backward=False)
            with (
                aliases.installed(),
                visiting(InOnePiece(columns, self.identity)),
                OnDemand(aliases, columns.computing),
                columns.computing[column].use(),
            ):
                output = door.call_exchanged(args, kwargs, self.to(columns.devices[column]))
            aliases.verify_returned([tensor for _, tensor in each(output)], f"'{door.name}'")
        return output

    # ------------------------------------------------------------------------------------------------------- pieces

    def prepare(self, module: nn.Module, *, recomputes: bool = True) -> None:
        """Put doors in front of the modules of the spine, which may have been replaced since the last mini-batch.

        Args:
            module: the model
            recomputes: whether modules run again at backward; the plain model of a proof must not
        """
        settings = self.settings
        children = list(module.modules())
        verify_compiled(children, settings.devices)
        self._has_hooks = any(map(has_call_hooks, children))
        structure = tuple([(id(child), *child._parameters) for child in children])
        if structure != self._structure:
            named = dict(module.named_modules())
            self._doors = [
                (weakref.ref(named[name]), name, column) for name, column in settings.doors.items() if name in named
            ]
            self._slots = [(weakref.ref(child), name, column) for child, name, column in settings.slots(module)]
            self._structure = structure
            move(module, settings)  # What is new, such as another head; the rest is there.
            # One that was wrapped since, as by torch.compile, would otherwise have a door behind that of its wrapper.
            for name, child in named.items():
                if name not in settings.doors:
                    remove_door(child, self.identity)
        for ref, name, column in self._doors:
            child = ref()
            if child is not None:
                runs_again = recomputes and name in settings.recomputed
                put_door(child, name, column, recomputes=runs_again, owner=self.identity)

    @contextmanager
    def aliased(
        self, module: nn.Module, *, backward: bool, watches: bool = False, alone: bool = False
    ) -> Iterator[Aliases]:
        """Let the modules have aliases of their parameters in a ``with`` block; see `aliases`."""
        with self._lock:
            aliases = self.aliases(module, backward=backward, watches=watches, alone=alone)
            with aliases.installed():
                yield aliases

    def aliases(self, module: nn.Module, *, backward: bool, watches: bool = False, alone: bool = False) -> Aliases:
        """Put doors in front of the spine, and return aliases of the parameters.

        Args:
            module: the model
            backward: whether gradients are wanted
            watches: whether to refuse gradients that come from elsewhere, even if the model seems to let no tensors out
            alone: whether the model runs alone, in which gradients come from anywhere
        """
        self.prepare(module, recomputes=not alone)
        slots = [(child, name, column) for ref, name, column in self._slots if (child := ref()) is not None]
        devices = self.settings.devices
        if self.host_memory is not None:
            self.host_memory.keep_frozen(weights_of(slots), devices)
        # What a hook has seen in a later column leads to an import, which refuses gradients from elsewhere.
        columns = len(devices) if watches or self.settings.keeps_tensors else int(self._has_hooks)
        return self._aliases_of(slots, backward=backward, watched=range(0 if alone else columns))

    def _aliases_of(self, slots: Sequence[Slot], *, backward: bool, watched: Container[int] = ()) -> Aliases:
        memory = self.host_memory
        if memory is not None:
            memory.streams = self.streams
        devices = self.settings.devices
        return Aliases(slots, devices, self.streams, self._lock, backward=backward, watched=watched, host_memory=memory)

    def _in_two_halves(self, m: int) -> Program:
        """Return the program of ``loss.backward()``: all forward, then all backward, last micro-batches first."""
        places = places_of(self.settings.devices)
        if self.host_memory is None:
            return program("GPipe", m, places)
        return [
            [Action(kind, i if kind == "F" else m - 1 - i, j) for half in "FB" for kind, i, j in own if kind == half]
            for own in program("LayerMajor", m, places)
        ]

    def _mini_batch(
        self,
        module: nn.Module,
        plain: Callable[..., Any],
        parts: Sequence[Arguments],
        finish: Finish,
        aliases: Aliases,
        actions: Program,
        *,
        backward: bool,
        schedule: Schedule | None = None,
        random_numbers: RandomNumbers | None = None,
    ) -> MiniBatch:
        settings, recorder, recomputes = self.settings, self.recorder, self._recomputes(module)
        step = None
        if recorder is not None:
            places = [Place(self.streams.current(device), own) for device, own in zip(settings.devices, settings.parts)]
            step = recorder.begin_step(len(parts), places, actions)
        columns = Columns(settings.devices, self.streams, labelled(step))
        bring = self.to(settings.devices[0])
        inputs = [Arguments(*mapped(tuple(part), bring, caches=columns.copies)) for part in parts]
        random_numbers = random_numbers or RandomNumbers(module, settings.devices)
        watched = None
        if self.host_memory is not None:
            kind = backward, self._structure, modes_of(module), len(parts[0].args), tuple(parts[0].kwargs)
            watched = None if kind in self._watched else lambda: self._watched.add(kind)
        return MiniBatch(
            plain,
            inputs,
            finish,
            columns,
            aliases,
            random_numbers,
            actions,
            backward=backward,
            splits=not recomputes,
            verified=self._to_verify(module, parts[0]) if backward else None,
            labels=settings.labels,
            model=f"{type(module).__name__}.forward",
            buffers=set(map(id, module.buffers())) if columns.copies else frozenset(),
            owner=self.identity,
            facts=MiniBatchFacts(schedule, backward, None if recomputes else "True"),
            watched=watched,
        )

    def _to_verify(self, module: nn.Module, part: Arguments) -> Callable[[], None] | None:
        """Return what notes that the graphs of such a mini-batch are verified; None if they were before."""
        given = tuple([name for name, value in part.kwargs.items() if value is not None])
        key = self._structure, modes_of(module), len(part.args), given
        return None if key in self._verified else lambda: self._verified.add(key)

    def to(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that copies a tensor of the caller's to ``device``."""
        return copier(self.streams, device)

    def _end(self, mini_batch: MiniBatch, rows: int) -> None:
        # Modules of the model's own may recompute, too.
        mini_batch.random_numbers.end(counts=rows > 0, recomputes=True)
        if not self.settings.layout.crossed:
            self.settings.layout.crossed = mini_batch.crossed

    def _recomputes(self, module: nn.Module) -> bool:
        """Return whether anything in the model runs again at backward, as far as that is known."""
        switched = any(getattr(child, "gradient_checkpointing", False) for child in module.modules())
        return bool(self.settings.recomputed) or switched

    def _verify(self, arguments: Arguments) -> None:
        """Refuse what micro-batches that are under way at once would mix up."""
        refuse_transforms()
        if arguments.kwargs.get("adapter_names") is not None and len(self.settings.devices) > 1:
            raise ValueError(
                "adapter_names puts hooks on the layers while a forward runs, and several are under way at once; "
                "pipeline the model before it gets adapters, or run each adapter's rows by themselves"
            )
        if self.settings.recomputed and caches_parametrizations() and len(set(self.settings.devices)) > 1:
            raise RuntimeError(
                "torch.nn.utils.parametrize.cached() is around a pipelined model whose modules run again at backward; "
                "threads of several devices share its cache, so the runs could differ: leave out cached() or checkpoint"
            )
        if is_checkpointed() and len(self.settings.devices) > 1:
            raise RuntimeError(
                "torch.utils.checkpoint is around a pipelined model, whose micro-batches save tensors in an order of "
                "their own; use pipelined(..., checkpoint=...), or the model's own switch"
            )

    def _stays_whole(self, arguments: Arguments, rows: int) -> bool:
        """Return whether a mini-batch passes the partitions in one piece, and tell that once: it has no speed-up."""
        if torch.is_grad_enabled():
            return False
        generates = arguments.kwargs.get("use_cache") is True or any(
            map(is_cache, (*arguments.args, *arguments.kwargs.values()))
        )
        streamed = ", and all weights come from host memory each time" * (self.host_memory is not None)
        if generates:
            how = f"without a speed-up{streamed}"
            self._tell(f"calls with a cache, as in generate(), pass the partitions in one piece, {how}", 8)
        elif rows == 0:
            said = self.settings.splitter.unsplit(arguments)
            self._tell(f"a call passes the partitions in one piece, without a speed-up{streamed}, as {said}", 8)
        return generates or rows == 0

    def micro_batches(self, arguments: Arguments, rows: int) -> tuple[list[int], list[Arguments]]:
        """Return the rows of each micro-batch, and its arguments; one micro-batch if there is nothing to split."""
        if rows == 0:
            return [1], [arguments]
        sizes = chunk_sizes(rows, self.settings.chunks)
        return sizes, self.settings.splitter.split(arguments, sizes)

    def _brought(self, arguments: Arguments, rows: int, parts: list[Arguments]) -> list[Arguments]:
        """Return micro-batches on the first device. The host waits for each copy, so an argument is copied in one."""
        given, devices = tuple(arguments), self.settings.devices
        copies = any([self.streams.moves(devices[0], device) for device in devices])
        moved = mapped(given, self.to(devices[0]), caches=copies)
        return parts if moved is given else self.micro_batches(Arguments(*moved), rows)[1]

    def _begin(self, arguments: Arguments, rows: int, stacklevel: int) -> None:
        """Tell of a mini-batch in training that cannot be split, and of a first one with few rows."""
        if not torch.is_grad_enabled() or len(self.settings.devices) == 1:
            return
        if rows == 0:
            said = self.settings.splitter.unsplit(arguments)
            self._tell(f"a training call runs as one micro-batch, without a speed-up, as {said}", stacklevel + 1)
        if not self._begun:
            self._begun = True
            tell_of_few(rows, self.settings.chunks, stacklevel)

    def _tell(self, what: str, stacklevel: int) -> None:
        if what not in self._told and (len(self.settings.devices) > 1 or self.host_memory is not None):
            self._told.add(what)
            warnings.warn(f"torchgpipe.pipelined: {what}", UserWarning, stacklevel=stacklevel)

    def _in_one_piece(self, module: nn.Module, plain: Callable[..., Any], arguments: Arguments) -> Any:
        if not Columns(self.settings.devices, self.streams).copies and self.host_memory is None:
            return plain(*arguments.args, **arguments.kwargs)
        if self.host_memory is not None:
            arguments = Arguments(*mapped(tuple(arguments), self.to(self.settings.devices[0])))
        with self.in_one_piece(module, backward=False) as aliases:
            output = plain(*arguments.args, **arguments.kwargs)
            if self.host_memory is not None:
                aliases.verify_returned([tensor for _, tensor in each(output)], "the model")
            return output

    @contextmanager
    def in_one_piece(self, module: nn.Module, *, backward: bool) -> Iterator[Aliases]:
        """Let the model run in this thread, from device to device, in a ``with`` block.

        Args:
            module: the model
            backward: whether gradients are wanted, which go to the aliases
        """
        columns = Columns(self.settings.devices, self.streams)
        visitor = InOnePiece(columns, self.identity)
        with self.aliased(module, backward=backward, alone=True) as aliases, ExitStack() as stack:
            if columns.copies or self.host_memory is not None:
                stack.enter_context(visiting(visitor))
            if columns.copies:
                stack.enter_context(visitor)
            if self.host_memory is not None:
                stack.enter_context(OnDemand(aliases, columns.computing))
            yield aliases

    def mini_batch_for_proof(
        self, module: nn.Module, plain: Callable[..., Any], parts: Sequence[Arguments], finish: Finish, aliases: Aliases
    ) -> MiniBatch:
        """Return a mini-batch that `Proof` runs in its own order, of a model that may draw."""
        actions = program("GPipe", len(parts), places_of(self.settings.devices))
        return self._mini_batch(
            module, plain, parts, finish, aliases, actions, backward=True, random_numbers=RandomNumbers(None)
        )
