"""Running a pipelined module: a mini-batch through `forward`, through `step`, or in one piece."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from torchgpipe.devices.stream import Streams
from torchgpipe.devices.torch_internals import saved_tensors_hooks_in_use
from torchgpipe.engine.direct_gradients import deliver
from torchgpipe.engine.function import refuse_transforms
from torchgpipe.engine.hooks import has_hooks
from torchgpipe.engine.label import labelled
from torchgpipe.engine.out_of_memory import MiniBatchFacts
from torchgpipe.engine.record import Place, Recorder
from torchgpipe.frames.cell import Export
from torchgpipe.frames.columns import Columns
from torchgpipe.frames.door import put_door
from torchgpipe.frames.exported import Exported
from torchgpipe.frames.inputs import Arguments, chunk_sizes
from torchgpipe.frames.loss import MicroBatchLoss, mean_or_sum
from torchgpipe.frames.mini_batch import Finish, MiniBatch
from torchgpipe.frames.outputs import join
from torchgpipe.frames.parameters import Aliases, Slot
from torchgpipe.frames.random_numbers import Draws, RandomNumbers
from torchgpipe.frames.settings import Settings
from torchgpipe.frames.values import is_cache, mapped
from torchgpipe.frames.visitors import InOnePiece, visiting
from torchgpipe.schedule import Program, Schedule, places_of, program, program_of

__all__ = ["Pipeline"]


class Pipeline:
    """What runs a pipelined module.

    Args:
        settings: the settings of the module

    Attributes:
        streams: the source of streams; a test can exchange it
        recorder: the listener to what runs when, if there is one
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.streams = Streams()
        self.recorder: Recorder | None = None
        self._lock = threading.RLock()
        self._structure: tuple[int, ...] = ()
        self._doors: list[tuple[nn.Module, str, int]] = []
        self._slots: list[Slot] = []
        #: For the training modes of all modules, what the model draws from.
        self._draws: dict[tuple[bool, ...], Draws] = {}
        self._told: set[str] = set()

    def __reduce__(self) -> Any:
        """Leave this out of copies and pickles, which make their own."""
        return type(None), ()

    def forward(self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a mini-batch, and return its output, with one autograd node that stands for all of it."""
        settings, arguments = self._settings, Arguments(args, kwargs)
        self._verify(arguments)
        rows = settings.splitter.rows_of(arguments)
        if self._stays_whole(arguments, rows):
            return self._in_one_piece(module, plain, arguments)
        sizes, parts = self._micro_batches(arguments, rows)
        named = [settings.splitter.names(part) for part in parts]
        backward = torch.is_grad_enabled()
        exported = Exported(len(parts), backward=backward)
        actions = program("GPipe", len(parts), places_of(settings.devices))
        with self._aliased(module, backward=backward) as aliases:
            facts = partial(self._facts, module, sizes, None, actions, backward=backward)
            mini_batch = self._mini_batch(
                module, plain, parts, exported.take, aliases, actions, facts, backward=backward
            )
            mini_batch.run_forward_half()
        self._end(module, mini_batch, rows)
        outputs = exported.in_graph_of_caller(mini_batch, aliases)
        return join(outputs, sizes, settings.kinds, mean_or_sum(settings, named, sizes))

    def step(
        self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], target: Any, kwargs: Any
    ) -> Any:
        """Run a mini-batch forward and backward under the schedule, and return its loss."""
        settings, arguments = self._settings, Arguments(args, kwargs)
        self._verify(arguments)
        rows = settings.splitter.rows_of(arguments)
        sizes, parts = self._micro_batches(arguments, rows)
        backward = torch.is_grad_enabled()
        target = mapped(target, self._to(settings.devices[-1]))
        loss = MicroBatchLoss(settings, [settings.splitter.names(part) for part in parts], sizes, target)

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
        with self._aliased(module, backward=backward) as aliases:
            try:
                facts = partial(self._facts, module, sizes, settings.schedule, actions, backward=backward)
                mini_batch = self._mini_batch(module, plain, parts, finish, aliases, actions, facts, backward=backward)
                mini_batch.run()
                result = loss.result()
                self._end(module, mini_batch, rows)
            except BaseException:
                aliases.take()
                raise
        if backward:
            entered = [(tensor, grad) for tensor, grad in mini_batch.take_input_gradients() if grad is not None]
            grads = aliases.take()
            if entered:  # First, because hooks of the caller's may fail.
                torch.autograd.backward([tensor for tensor, _ in entered], [grad for _, grad in entered])
            _add(list(zip(aliases.trained, grads)))
        return result

    # ------------------------------------------------------------------------------------------------------- pieces

    def prepare(self, module: nn.Module) -> None:
        """Put doors in front of the modules of the spine, which may have been replaced since the last mini-batch."""
        settings = self._settings
        structure = tuple(map(id, module.modules()))
        if structure != self._structure:
            children = dict(module.named_modules())
            self._doors = [
                (children[name], name, column) for name, column in settings.doors.items() if name in children
            ]
            self._slots = settings.slots(module)
            self._structure = structure
        for child, name, column in self._doors:
            put_door(child, name, column, recomputes=name in settings.recomputed, owner=self)

    @contextmanager
    def _aliased(self, module: nn.Module, *, backward: bool) -> Iterator[Aliases]:
        """Put doors in front of the spine, and let the modules have aliases of their parameters in a ``with`` block."""
        refuse_transforms()
        with self._lock:
            self.prepare(module)
            streams = self.streams
            slots = [slot for slot in self._slots if slot[1] in slot[0]._parameters]
            places = (self._settings.devices, streams.moves, streams.device_of)
            aliases = Aliases(slots, *places, self._lock, backward=backward)
            with aliases.installed():
                yield aliases

    def _mini_batch(
        self,
        module: nn.Module,
        plain: Callable[..., Any],
        parts: Sequence[Arguments],
        finish: Finish,
        aliases: Aliases,
        actions: Program,
        facts: Callable[[], MiniBatchFacts],
        *,
        backward: bool,
    ) -> MiniBatch:
        settings, recorder = self._settings, self.recorder
        step = None
        if recorder is not None:
            places = [Place(self.streams.current(device), own) for device, own in zip(settings.devices, settings.parts)]
            step = recorder.begin_step(len(parts), places, actions)
        columns = Columns(settings.devices, self.streams, labelled(step))
        bring = self._to(settings.devices[0])
        inputs = [Arguments(*mapped(tuple(part), bring, caches=columns.copies)) for part in parts]
        random_numbers = RandomNumbers(self._draws.get(_modes(module)))
        return MiniBatch(
            plain,
            inputs,
            finish,
            columns,
            aliases,
            random_numbers,
            actions,
            backward=backward,
            splits=not self._recomputes(module),
            labels=settings.labels,
            buffers=set(map(id, module.buffers())) if columns.copies else frozenset(),
            owner=self,
            facts=facts,
        )

    def _to(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that copies a tensor of the caller's to ``device``."""

        def bring(tensor: Tensor) -> Tensor:
            there = self.streams.device_of(tensor)
            return tensor.to(device) if there is not None and self.streams.moves(there, device) else tensor

        return bring

    def _facts(
        self, module: nn.Module, sizes: list[int], schedule: Schedule | None, actions: Program, *, backward: bool
    ) -> MiniBatchFacts:
        """Return what a note about memory is made from."""
        settings, recomputes = self._settings, self._recomputes(module)
        return MiniBatchFacts(
            len(sizes),
            sizes[0],
            settings.devices,
            [label.partition(" (")[0] for label in settings.labels],
            schedule,
            actions,
            backward,
            stops=[0] * len(settings.devices),
            partly=recomputes,
            splits=not recomputes,
            advises=None if recomputes or not backward else "pipelined",
        )

    def _end(self, module: nn.Module, mini_batch: MiniBatch, rows: int) -> None:
        random_numbers = mini_batch.random_numbers
        modes = _modes(module)
        if random_numbers.has_drawn_unseen():
            self._draws[modes] = Draws(True, True)
            if not (torch.is_grad_enabled() and self._recomputes(module)):
                return
            raise RuntimeError(
                "random numbers were drawn from the CPU's generator in this mini-batch, though the model drew none "
                "before, so a recomputation may draw others; run it again: from now on, micro-batches have seeds"
            )
        draws = random_numbers.end()
        if rows:  # Without rows, layers that draw have drawn nothing.
            self._draws[modes] = draws
        if not self._settings.layout.crossed:
            self._settings.layout.crossed = mini_batch.crossed

    def _recomputes(self, module: nn.Module) -> bool:
        """Return whether anything in the model runs again at backward, as far as that is known."""
        switched = any(getattr(child, "gradient_checkpointing", False) for child in module.modules())
        return bool(self._settings.recomputed) or switched

    def _verify(self, arguments: Arguments) -> None:
        """Refuse what micro-batches that are under way at once would mix up."""
        if arguments.kwargs.get("adapter_names") is not None and len(self._settings.devices) > 1:
            raise ValueError(
                "adapter_names puts hooks on the layers while a forward runs, and several are under way at once; "
                "pipeline the model before it gets adapters, or run each adapter's rows by themselves"
            )
        hooks = saved_tensors_hooks_in_use()
        if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" and len(self._settings.devices) > 1:
            raise RuntimeError(
                "torch.utils.checkpoint is around a pipelined model, whose micro-batches save tensors in an order of "
                "their own; use pipelined(..., checkpoint=...), or the model's own switch"
            )

    def _stays_whole(self, arguments: Arguments, rows: int) -> bool:
        """Return whether a mini-batch passes the partitions in one piece; what has no speed-up is told once."""
        if torch.is_grad_enabled():
            if rows == 0:
                self._tell("a training call has nothing to split, so it runs as one micro-batch, without a speed-up")
            return False
        generates = arguments.kwargs.get("use_cache") is True or any(
            map(is_cache, (*arguments.args, *arguments.kwargs.values()))
        )
        if generates:
            self._tell("calls with a cache, as in generate(), pass the partitions in one piece, without a speed-up")
        elif rows == 0:
            self._tell("a call has nothing to split, so it passes the partitions in one piece, without a speed-up")
        return generates or rows == 0

    def _micro_batches(self, arguments: Arguments, rows: int) -> tuple[list[int], list[Arguments]]:
        """Return the rows of each micro-batch, and its arguments; one micro-batch if there is nothing to split."""
        if rows == 0:
            return [1], [arguments]
        sizes = chunk_sizes(rows, self._settings.chunks)
        return sizes, self._settings.splitter.split(arguments, sizes)

    def _tell(self, what: str) -> None:
        if what not in self._told and len(self._settings.devices) > 1:
            self._told.add(what)
            warnings.warn(f"torchgpipe.pipelined: {what}", UserWarning, stacklevel=8)  # the caller of the model

    def _in_one_piece(self, module: nn.Module, plain: Callable[..., Any], arguments: Arguments) -> Any:
        columns = Columns(self._settings.devices, self.streams)
        if not columns.copies:
            return plain(*arguments.args, **arguments.kwargs)
        visitor = InOnePiece(columns, self)
        with self._aliased(module, backward=False), visiting(visitor), visitor:
            return plain(*arguments.args, **arguments.kwargs)


def _modes(module: nn.Module) -> tuple[bool, ...]:
    return tuple([child.training for child in module.modules()])


def _add(gradients: list[tuple[Tensor, Tensor | None]]) -> None:
    """Add gradients to ``.grad`` of parameters; their hooks hear them."""
    heard = [
        (one, grad)
        for one, grad in gradients
        if grad is not None and (not one.is_leaf or has_hooks(one, get_gradient_edge(one).node))
    ]
    before = [(one, one.grad, None if one.grad is None else one.grad.clone()) for one, _ in heard]
    try:
        deliver(heard)  # First, because a hook may fail.
    except BaseException:
        for one, grad, values in before:
            one.grad = grad if grad is None or values is None else grad.detach().copy_(values)
        raise
    done = {id(one) for one, _ in heard}
    with torch.no_grad():
        for one, grad in gradients:
            if grad is not None and id(one) not in done:
                one.grad = grad if one.grad is None else one.grad.add_(grad)
