"""Running a pipelined module: a mini-batch through `forward`, through `step`, or in one piece."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.batch.given import order_of
from torchgpipe.batch.inputs import Arguments, SplitBatch
from torchgpipe.batch.loss_proof import LossProof
from torchgpipe.batch.microbatch import tell_of_few
from torchgpipe.batch.outputs import join
from torchgpipe.batch.sequence import CarriedCache
from torchgpipe.cell.cell import Export
from torchgpipe.cell.out_of_memory import MiniBatchFacts
from torchgpipe.devices.stream import Stream, Streams
from torchgpipe.devices.torch_internals import caches_parametrizations, has_call_hooks, is_checkpointed, own_call
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.gradients.failed_step import all_or_nothing
from torchgpipe.gradients.of_steps import with_gradients
from torchgpipe.gradients.step_lock import StepLock
from torchgpipe.graph.function import refuse_transforms
from torchgpipe.listener.label import labelled
from torchgpipe.listener.listener import Place, Recorder
from torchgpipe.model.untouched import in_mode, untouched
from torchgpipe.model.values import each, is_cache, mapped
from torchgpipe.model.verify import verify_threads
from torchgpipe.offload.aliases import make_aliases
from torchgpipe.offload.host_memory import HostMemory
from torchgpipe.offload.residence import on_demand
from torchgpipe.pipeline.numbers import MicroBatchLoss, Numbers
from torchgpipe.pipeline.outer import Exported
from torchgpipe.pipeline.together import Together
from torchgpipe.replay.random_numbers import RandomNumbers, modes_of
from torchgpipe.run.carried import Carried, verify_sequence
from torchgpipe.run.columns import Columns
from torchgpipe.run.mini_batch import Finish, MiniBatch
from torchgpipe.run.visitors import InOnePiece, unobserved
from torchgpipe.schedule import Action, Program, Schedule, program, program_of
from torchgpipe.spine.door import Door, Owner, put_door, remove_door, visiting
from torchgpipe.spine.glue import explain_compiler
from torchgpipe.spine.move import move
from torchgpipe.spine.settings import Settings
from torchgpipe.spine.weights import add_shared, own_slots
from torchgpipe.transport.copier import copier

__all__ = ["Pipeline"]


class Pipeline:
    """What runs a pipelined module.

    Args:
        module: the module, which holds this object
        settings: the settings of the module

    Attributes:
        settings: the settings of the module
        identity: stands for this pipeline where a reference to it would be a cycle
        streams: the source of streams; a test can exchange it
        recorder: the listener to what runs when, if there is one
        host_memory: transfers weights to devices, if they live in host memory
    """

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        self._module = weakref.ref(module)
        self.settings = settings
        self.identity: Owner = weakref.ref(self)
        self.streams = Streams()
        self.recorder: Recorder | None = None
        self._lock = StepLock()
        self._structure: tuple[Any, ...] = ()
        # Weakly, as the module is among them.
        self._doors: list[tuple[weakref.ref[nn.Module], str, int]] = []
        self._slots: list[tuple[weakref.ref[nn.Module], str, int]] = []
        #: Whether modules have hooks, which may see what they return.
        self._has_hooks = False
        #: Whether a mini-batch was trained by a call.
        self._has_trained = False
        #: The kinds of mini-batches whose graphs were verified, and their operations on weights in host memory.
        self._verified: set[Any] = set()
        self._told: set[str] = set()
        self.host_memory = HostMemory(settings.devices, *settings.offload) if settings.offload is not None else None
        self._begun = False
        self._loss_proof = LossProof()
        self.together = None if settings.processes is None else Together(settings.processes, settings)

    def __reduce__(self) -> Any:
        """Leave this out of copies and pickles, which make their own."""
        return type(None), ()

    @property
    def module(self) -> Any:
        """The module that this runs, as long as anybody has it."""
        return self._module()

    @property
    def has_last(self) -> bool:
        """Whether this process has the last column."""
        return self.together is None or self.together.processes.rank == self.together.processes.last

    def at_step(self) -> AbstractContextManager[None]:
        """Surround a step, on which all processes agree, if there are several."""
        return nullcontext() if self.together is None else self.together.processes.at_step()

    def forward(self, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a mini-batch, and return its output, with one autograd node that stands for all of it.

        Of micro-batches that the caller gives, return a list with the output of each. The output is on the last device;
        its numbers are where the batch is, if that is one of the devices: there a Trainer adds up losses.
        """
        with self.at_step():
            output = self._forward(args, kwargs)
        places = filter(None, (self.streams.device_of(tensor) for _, tensor in each((args, kwargs))))
        home = next(places, self.settings.devices[-1])
        if home not in self.settings.devices[:-1] or self.together is not None:
            return output
        return mapped(output, lambda tensor: tensor if tensor.dim() else self.to(home)(tensor))

    def _forward(self, args: tuple[Any, ...], kwargs: Any) -> Any:
        settings = self.settings
        batch = settings.study.splitter.micro_batches(Arguments(args, kwargs), settings.chunks)
        self._verify(batch)
        if self._stays_whole(batch):
            if self.together is not None:
                raise ValueError(
                    "over several processes, a mini-batch is split into micro-batches of rows, without a cache: pass "
                    "use_cache=False, and generate with a model in one process, which loads the state_dict"
                )
            outputs = [*map(self._run_in_one_piece, batch.arguments)]
            return outputs if batch.window is not None else outputs[0]
        self._begin(batch, 8)  # the caller of the model
        backward = torch.is_grad_enabled()
        if backward and settings.processes is not None and settings.processes.replica_group is not None:
            raise ValueError(
                "over replicas, train by model.step(...), whose loss and gradients are those of all replicas; what the "
                "caller makes of the outputs is that of one"
            )
        joins, numbers = batch.window is None and len(batch.sizes) > 1, Numbers(settings, batch)
        if joins:
            numbers.count()
        exported = Exported(len(batch.sizes))
        actions = self._in_two_halves(len(batch.sizes))
        # The study does not see every way that tensors leave a model, such as a list of the caller's.
        with self.aliased(backward=backward, watches=not self._has_trained) as aliases:
            mini_batch = self._mini_batch(batch, exported.take, aliases, actions, backward=backward)
            mini_batch.run_forward_half()
        mini_batch.watch_inputs(batch.arguments)
        self._has_trained |= backward
        if self.together is not None:
            values = exported.values(gather=settings.gathers) if self.has_last else None
            exported.fill(self.together.end(mini_batch, values)[self.together.processes.last])
        self._end(mini_batch, batch.rows)
        outputs = exported.in_graph_of_caller(mini_batch)
        if not joins:
            return outputs if batch.window is not None else outputs[0]
        return join(outputs, batch.sizes, settings.study.kinds[self.module.training], numbers.join)

    def step(self, args: tuple[Any, ...], target: Any, kwargs: Any, scaler: torch.amp.GradScaler | None = None) -> Any:
        """Run a mini-batch forward and backward under the schedule, and return its loss."""
        settings, arguments = self.settings, Arguments(args, kwargs)
        if self.together is not None and scaler is not None:
            raise ValueError(
                "over several processes, each would skip other steps by the infinities in its own gradients; leave "
                "scaler out, and use torch.bfloat16, which needs none"
            )
        undone = all_or_nothing(self.module, settings.loss_fn, settings.devices)
        with self.at_step(), self._lock.held(alone=True), undone:
            return self._step(arguments, target, scaler)

    def _step(self, arguments: Arguments, target: Any, scaler: torch.amp.GradScaler | None) -> Any:
        settings = self.settings
        batch = settings.study.splitter.micro_batches(arguments, settings.chunks)
        self._verify(batch)
        self._begin(batch, 5)  # the caller of step
        backward = torch.is_grad_enabled()
        to_device, training = self.to(settings.devices[-1]), self.module.training
        loss = MicroBatchLoss(settings, batch, target, to_device, training=training, proof=self._loss_proof)

        def finish(i: int, output: Any, export: Callable[[Tensor], Export] | None) -> None:
            if not self.has_last:
                return
            value, weight = loss.of(i, output)
            if export is not None:
                if not value.requires_grad:
                    raise RuntimeError(
                        "the loss does not require grad, so there is nothing to train; does the output depend on a "
                        "parameter that requires grad?"
                    )
                with unobserved():  # Nothing of this has to be imported, and each operation would look for it.
                    share = torch.full_like(value, weight)
                    export(value).add(share if scaler is None else scaler.scale(share))

        m = len(batch.sizes)
        if batch.carried is None:
            actions = program_of(settings.schedule, m, settings.places, order_of(batch.window, self.module))
        else:
            actions = self._in_two_halves(m)  # Keys get gradients from all later chunks, so these come first.

        def work() -> Any:
            with aliases.installed():
                mini_batch = self._mini_batch(
                    batch, finish, aliases, actions, backward=backward, schedule=settings.schedule
                )
                if settings.processes is not None:
                    loss.add_replicas(settings.processes)
                mini_batch.run()
                result: Any = loss.result() if self.has_last else None
                if self.together is not None:
                    result = self._shared(self.together, mini_batch, result)
                self._end(mini_batch, batch.rows)
                return result, ((tensor, source.total()) for tensor, source in mini_batch.inputs_with_grad())

        with self._lock.held(alone=True):
            aliases = self.aliases(backward=backward)
            return with_gradients(aliases, work, settings.processes)

    def _shared(self, together: Together, mini_batch: MiniBatch, result: Any) -> Any:
        """Return the result of a step, which the last process has, and add up gradients of shared parameters."""
        last, gathers = together.processes.last, self.settings.gathers
        if result is not None and together.processes.replica_group is not None:
            own = result[0] if isinstance(result, tuple) else result
            total = own.detach().double().cpu()
            together.processes.add_replicas(total, "the loss of the replicas")
            own.data.copy_(total)
        told = together.told(result, gather=gathers) if together.processes.rank == last else None
        heard = together.end(mini_batch, told)[last]
        if torch.is_grad_enabled():
            add_shared(together.doors.users, mini_batch.aliases, together.processes)
        return together.heard(heard) if result is None else result

    def call_outside(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Call a module of the spine on its device, and bring what it returns to where its arguments were.

        So methods of the model beside forward run on several devices, as far as they call modules of the spine.

        Raises:
            RuntimeError: a method that was set in the place of forward trains the model, without micro-batches.
        """
        # Accelerate puts an autocast around it.
        method = getattr(self.module, "_original_forward", self.module.forward)
        if torch.is_grad_enabled() and getattr(method, "__func__", None) not in (None, type(self.module).forward):
            raise RuntimeError(
                f"'{door.name}' is called past the pipeline, by another forward that was set on the model, as "
                "trainers of TRL and Liger kernels do; give the trainer pipelined(get_peft_model(model, ...), ...), "
                "whose forward they leave alone, or call del model.forward"
            )
        if self.host_memory is not None:
            return self._call_from_host_memory(door, args, kwargs)
        devices, streams = self.settings.devices, self.streams
        device = devices[door.column]
        sources = [place for _, value in each((args, kwargs)) if (place := streams.device_of(value)) is not None]
        if not any([streams.moves(source, device) for source in sources]):
            return door.call_module(args, kwargs)
        with streams.current(device).use():
            output = door.call_exchanged(args, kwargs, self.to(device))
        # What is on none of the devices, such as a batch on the host, stays on the first device that it comes to.
        return mapped(output, self.to(sources[0])) if sources[0] in devices else output

    def _call_from_host_memory(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Call a module of the spine while its weights are on its device, without a graph."""
        if torch.is_grad_enabled() and any([parameter.requires_grad for parameter in door.module.parameters()]):
            raise RuntimeError(
                f"'{door.name}' is called outside of the model's forward, where nothing brings its weights back from "
                "host memory for backward; call it in torch.no_grad(), or call the model"
            )
        with self.in_one_piece(backward=False) as aliases:
            output = door(*args, **kwargs)
            aliases.verify_returned((tensor for _, tensor in each(output)), f"'{door.name}'")
            return output

    # ------------------------------------------------------------------------------------------------------- pieces

    def prepare(self, *, recomputes: bool = True) -> None:
        """Put doors in front of the modules of the spine, which may have been replaced since the last mini-batch.

        Args:
            recomputes: whether modules run again at backward; the plain model of a proof must not
        """
        module, settings = self.module, self.settings
        children = list(module.modules())
        verify_threads(children, settings.devices)
        self._has_hooks = any(map(has_call_hooks, children))
        structure: tuple[Any, ...] = tuple([(weakref.ref(child), *child._parameters) for child in children])
        if self.together is not None:  # It knows parameters themselves, which load_state_dict(assign=True) replaces.
            structure += tuple([id(parameter) for child in children for parameter in child._parameters.values()])
        if structure != self._structure:
            named = dict(module.named_modules())
            self._doors = [
                (weakref.ref(named[name]), name, column) for name, column in settings.doors.items() if name in named
            ]
            users = None if self.together is None else self.together.find_users(module)
            self._slots = [
                (weakref.ref(child), name, column) for child, name, column in own_slots(module, settings, users)
            ]
            self._structure = structure
            if self.host_memory is None or settings.offload is not None:  # Else a proof has fetched the weights.
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
    def aliased(self, *, backward: bool, watches: bool = False, alone: bool = False) -> Iterator[Aliases]:
        """Let the modules have aliases of their parameters in a ``with`` block; see `aliases`."""
        with self._lock.held(alone=True):
            aliases = self.aliases(backward=backward, watches=watches, alone=alone)
            with aliases.installed():
                yield aliases

    def aliases(self, *, backward: bool, watches: bool = False, alone: bool = False) -> Aliases:
        """Put doors in front of the spine, and return aliases of the parameters.

        Args:
            backward: whether gradients are wanted
            watches: whether to refuse gradients that come from elsewhere, even if the model seems to let no tensors out
            alone: whether the model runs alone, in which gradients come from anywhere
        """
        self.prepare(recomputes=not alone)
        slots = [(child, name, column) for ref, name, column in self._slots if (child := ref()) is not None]
        devices, memory = self.settings.devices, self.host_memory
        watched = not alone and (watches or self.settings.study.keeps_tensors or self._has_hooks)
        return make_aliases(slots, devices, self.streams, self._lock, memory, backward=backward, watched=watched)

    def _in_two_halves(self, m: int) -> Program:
        """Return the program of ``loss.backward()``: all forward, then all backward, last micro-batches first."""
        places = self.settings.places
        if self.host_memory is None:
            return program("GPipe", m, places)
        return [
            [Action("F", i, j) for kind, i, j in actions if kind == "F"]
            + [Action("B", m - 1 - i, j) for kind, i, j in actions if kind == "B"]
            for actions in program("LayerMajor", m, places)
        ]

    def _mini_batch(
        self,
        batch: SplitBatch,
        finish: Finish,
        aliases: Aliases,
        actions: Program,
        *,
        backward: bool,
        schedule: Schedule | None = None,
        random_numbers: RandomNumbers | None = None,
        patience: float | None = None,
    ) -> MiniBatch:
        module, settings, recorder, recomputes = self.module, self.settings, self.recorder, self._recomputes()
        m, step = len(batch.sizes), None
        modes = modes_of(module)
        random_numbers = random_numbers or RandomNumbers(module, settings.devices, modes)
        if self.together is not None:
            self.together.begin(module, batch, random_numbers, modes, f"{schedule}")
        if recorder is not None:
            step = recorder.begin_step(m, [*map(Place, self._computing(), settings.parts)])
        columns = Columns(
            settings,
            m,
            self.streams,
            aliases,
            self.identity,
            labelled(step),
            splits=not recomputes,
            patience=patience,
            random_numbers=random_numbers,
            remote_doors=None if self.together is None else self.together.doors,
        )
        # The host waits for each copy, so an argument is copied in one.
        inputs = batch.mapped(self.to(settings.devices[0]), caches=columns.copies).parts
        return MiniBatch(
            module._torchgpipe_forward,
            f"{type(module).__name__}.forward",
            inputs,
            finish,
            columns,
            actions,
            backward=backward,
            verified=self._to_verify(inputs if batch.given else inputs[:1], modes, backward=backward),
            facts=MiniBatchFacts(schedule, backward, None if recomputes else "True"),
            carried=self._carried(batch),
        )

    def _carried(self, batch: SplitBatch) -> Carried | None:
        """Return what the micro-batches hand on, if they are chunks of one sequence."""
        if batch.carried is None:
            return None
        doors = [own_call(child) for ref, _, _ in self._doors if (child := ref()) is not None]
        return Carried(batch.carried, [(door.column, door.layers) for door in doors if isinstance(door, Door)])

    def _to_verify(self, parts: Sequence[Arguments], modes: Any, *, backward: bool) -> Callable[[], None] | None:
        """Return what notes that such a mini-batch is verified; None if one was before.

        Args:
            parts: the arguments of micro-batches, which may take different ways through the model
            modes: the modes of its modules
            backward: whether backward follows
        """
        given = [(len(args), *[name for name, value in kwargs.items() if value is not None]) for args, kwargs in parts]
        key = backward, self._structure, modes, frozenset(given)
        return None if key in self._verified else lambda: self._verified.add(key)

    def to(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that copies a tensor of the caller's to ``device``."""
        return copier(self.streams, device)

    def _computing(self) -> list[Stream]:
        """Return the stream that each column computes on."""
        return [self.streams.current(device) for device in self.settings.devices]

    def _copies(self) -> bool:
        """Return whether tensors are copied from column to column."""
        return any([self.streams.moves(self.settings.devices[0], device) for device in self.settings.devices])

    def _end(self, mini_batch: MiniBatch, rows: int) -> None:
        # Modules of the model's own may recompute, too.
        mini_batch.random_numbers.end(counts=rows > 0, recomputes=True)
        for place, name in mini_batch.columns.reads.items():
            self._tell(f"{place}: '{name}' reads a value that one process has, and all others wait for each of them", 3)
        if not self.settings.layout.crossed:
            self.settings.layout.crossed = mini_batch.columns.crossed

    def _recomputes(self) -> bool:
        """Return whether anything in the model runs again at backward, as far as that is known."""
        switched = any(getattr(child, "gradient_checkpointing", False) for child in self.module.modules())
        return bool(self.settings.recomputed) or switched

    def _verify(self, batch: SplitBatch) -> None:
        """Refuse what micro-batches that are under way at once would mix up."""
        refuse_transforms()
        if batch.carried is not None:
            if torch.is_grad_enabled() and self._recomputes():
                raise ValueError(
                    "chunks of a sequence cannot run again at backward, when the cache has later chunks; leave "
                    "checkpoint= and gradient checkpointing out, or train on the whole sequence"
                )
            batch.carried.verify_empty()
            self._verify_sequence(batch.carried)
        adapters = any([part.kwargs.get("adapter_names") is not None for part in batch.arguments])
        if adapters and len(self.settings.devices) > 1:
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

    def _verify_sequence(self, carried: CarriedCache) -> None:
        """Check once that the plain model gives for chunks of a sequence what it gives for the whole."""
        module, to_device = self.module, self.to(self.settings.devices[0])

        def run(arguments: dict[str, Any]) -> Any:
            return self._run_in_one_piece(Arguments((), arguments).mapped(to_device, caches=False))

        if "chunks" not in self._verified:
            with in_mode(module, False), untouched(module, self.settings.devices), torch.no_grad():
                verify_sequence(carried, run, self.settings.study.epsilon)
            self._verified.add("chunks")

    def _stays_whole(self, batch: SplitBatch) -> bool:
        """Return whether a mini-batch passes the partitions in one piece, and tell that once: it has no speed-up."""
        if torch.is_grad_enabled() or batch.carried is not None:
            return False
        asked = any([part.kwargs.get("use_cache") is True for part in batch.arguments])
        given = [value for part in batch.arguments for value in (*part.args, *part.kwargs.values())]
        generates = asked or any(map(is_cache, given))
        cost = "without a speed-up" + ", and all weights come from host memory each time" * bool(self.host_memory)
        if generates:
            self._tell(f"calls with a cache, as in generate(), pass the partitions in one piece, {cost}", 9)
        elif batch.rows == 0:
            why = batch.splitter.unsplit(batch.arguments[0])
            self._tell(f"a call passes the partitions in one piece, {cost}, as {why}", 9)
        return generates or batch.rows == 0

    def _begin(self, batch: SplitBatch, stacklevel: int) -> None:
        """Tell of a mini-batch in training that cannot be split, and of a first one with few rows."""
        if not torch.is_grad_enabled() or len(self.settings.devices) == 1:
            return
        if batch.rows == 0:
            why = batch.splitter.unsplit(batch.arguments[0])
            self._tell(f"a training call runs as one micro-batch, without a speed-up, as {why}", stacklevel + 1)
        if not self._begun and not batch.given:
            self._begun = True
            tell_of_few(batch.rows, self.settings.chunks, stacklevel)

    def _tell(self, message: str, stacklevel: int) -> None:
        if message not in self._told and (len(self.settings.devices) > 1 or self.host_memory is not None):
            self._told.add(message)
            warnings.warn(f"torchgpipe.pipelined: {message}", UserWarning, stacklevel=stacklevel)

    def _run_in_one_piece(self, arguments: Arguments) -> Any:
        if not self._copies() and self.host_memory is None:
            return self.module._torchgpipe_forward(*arguments.args, **arguments.kwargs)
        if self.host_memory is not None:
            arguments = arguments.mapped(self.to(self.settings.devices[0]), caches=False)
        with self.in_one_piece(backward=False) as aliases:
            output = self.module._torchgpipe_forward(*arguments.args, **arguments.kwargs)
            aliases.verify_returned((tensor for _, tensor in each(output)), "the model")
            return output

    @contextmanager
    def in_one_piece(self, *, backward: bool, moved: Callable[[int], None] = lambda _: None) -> Iterator[Aliases]:
        """Let the model run in this thread, from device to device, in a ``with`` block, and provide its aliases.

        Args:
            backward: whether gradients are wanted, which go to the aliases
            moved: is called with the column of each module of the spine
        """
        with self.aliased(backward=backward, alone=True) as aliases:
            visitor = InOnePiece(self.settings.devices, self.streams, self.identity, moved)
            with visiting(visitor), visitor if self._copies() else nullcontext(), on_demand(aliases, self._computing()):
                try:
                    yield aliases
                except BaseException as error:
                    explain_compiler(error)
                    raise

    def alone(self) -> Pipeline:
        """Return what runs the plain model in one of several processes, which has the weights in host memory."""
        whole = Pipeline(self.module, replace(self.settings, processes=None))
        whole.identity, whole.streams, whole._lock = self.identity, self.streams, self._lock
        whole.host_memory = HostMemory(self.settings.devices, 1, 0, activations=False)
        return whole

    def mini_batch_for_proof(
        self, batch: SplitBatch, finish: Finish, aliases: Aliases, patience: float | None, *, backward: bool = True
    ) -> MiniBatch:
        """Return a mini-batch of a model that may draw, for a proof; `MiniBatch` and `Columns` know the arguments."""
        actions = program("GPipe", len(batch.sizes), self.settings.places)
        patience = None if self.together is not None else patience  # A micro-batch waits for other processes, too.
        batch = batch.mapped(Tensor.clone)  # Which the model may change; every run of a proof begins with the same.
        return self._mini_batch(
            batch, finish, aliases, actions, backward=backward, random_numbers=RandomNumbers(None), patience=patience
        )
