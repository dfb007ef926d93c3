"""Who runs a model whose spine has doors: a micro-batch in its frame, a recomputation, or all rows in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe.cell.cell import Cell
from torchgpipe.devices.torch_internals import storage_key, without_function_mode
from torchgpipe.frames.columns import Columns, Shared
from torchgpipe.frames.crossing import Crossing
from torchgpipe.frames.door import Door, Owner, Visitor, this_thread
from torchgpipe.frames.frame import Frame
from torchgpipe.frames.glue import Glue
from torchgpipe.frames.operations import DIFFERENTIATES, OF_THE_ORIGINAL, changes_in_place
from torchgpipe.frames.recomputed import Keep
from torchgpipe.model.values import Exchanged, each, is_cache, mapped
from torchgpipe.offload.residence import Residence

__all__ = ["InOnePiece", "RecomputationVisitor", "Traveller", "unobserved", "visiting"]


@contextmanager
def visiting(visitor: Visitor) -> Iterator[None]:
    """Visit the doors that this thread reaches in a ``with`` block."""
    outer, this_thread.visitor = this_thread.visitor, visitor
    try:
        yield
    finally:
        this_thread.visitor = outer


class Traveller:
    """The visitor in a frame, which stops at the doors of later columns until it is their turn.

    Args:
        frame: the frame
        cells: the cells of the frame, by column; empty if there is no backward
        shared: what all frames share
        residence: which tensors are on their devices
        arguments: the arguments of the model, whose memory is the caller's

    Attributes:
        frame: the frame
        owner: the identity of the pipeline
    """

    def __init__(self, frame: Frame, cells: list[Cell], shared: Shared, residence: Residence, arguments: Any) -> None:
        self.frame, self.owner = frame, shared.owner
        self._shared, self._columns, self._residence = shared, shared.columns, residence
        self._callers = {storage_key(tensor) for _, tensor in each(arguments)} if residence.has_copies else set()
        self._crossing = Crossing(frame, cells, shared)
        self._glue = Glue(frame, self._crossing, shared.columns)
        self._current_stream = ExitStack()

    def run(self, model: Callable[[], Any], finish: Callable[[Any], None]) -> None:
        """Run the model, and pass its output to ``finish`` in the last column."""
        last = len(self._columns.devices) - 1
        with visiting(self):
            self.frame.begin_work()
            if last == 0:
                finish(model())
                return
            with self._current_stream:
                self._current_stream.enter_context(self._columns.computing[0].use())
                with self._glue if self._crossing.is_needed else nullcontext():
                    output = model()
                    with self._without_glue():
                        self.go_to(last, "the end")
                    self.frame.begin_work()
                    finish(output)
            self._crossing.end()

    def import_value(self, value: Any) -> Any:
        """Return ``value`` with all its tensors in the present column."""
        if len(self._columns.devices) == 1 or not self._crossing.is_needed:
            return value
        with self._without_glue():
            return mapped(value, self._crossing.import_tensor)

    def go_to(self, column: int, name: str) -> None:
        """Stop until it is the turn of ``column``.

        Raises:
            RuntimeError: the column is an earlier one.
        """
        frame = self.frame
        if column == frame.column:
            return
        if column < frame.column:
            names = self._columns.names
            raise RuntimeError(
                f"'{name}' belongs to {names[column]}, but the model has called it after modules of "
                f"{names[frame.column]}, which it did not do with the sample; give a sample that takes this way, or a "
                f"balance that keeps '{name}' and what is called before it in one partition"
            )
        self._crossing.forget()
        frame.pause_until(column)
        self._current_stream.enter_context(self._columns.computing[column].use())

    def visit(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Stop at ``door`` until it is the turn of its column, import the arguments, and call the module."""
        frame = self.frame
        frame.module = door.name
        if len(self._columns.devices) == 1:
            return door.call_module(args, kwargs, self._keep)
        if self._glue.is_off:  # Within a module of the spine, whose arguments are imports.
            return self._shared.here(door, frame.column).call_module(args, kwargs)
        with self._without_glue():
            door = self._shared.here(door, frame.column)
            with self._evicted(door.column, (args, kwargs)):
                self.go_to(door.column, door.name)
            exchanged: Exchanged | None = None
            if frame.column and self._crossing.is_needed:
                exchanged = Exchanged(args, kwargs, self._crossing.import_tensor)
                args, kwargs = exchanged.args, exchanged.kwargs
                for value in (*args, *kwargs.values()):
                    if is_cache(value):
                        _import_layers(value, door.layers, self._crossing.import_tensor)
            frame.begin_work()  # Here, as an accelerator has waited for the arguments before.
            output = door.call_module(args, kwargs, self._keep)
            if exchanged is not None:
                exchanged.hand_over()
            if self._columns.copies:
                for _, tensor in each(output):
                    self._crossing.mark_made(tensor)
            return output

    @property
    def _keep(self) -> Keep | None:
        """What returns what is kept of an argument until its module runs again; None if that is the argument."""
        if not self._residence.has_copies:
            return None
        i, j, keep = self.frame.i, self.frame.column, self._residence.keep
        # Cells share tensors without grad, such as masks.
        return lambda tensor: keep(tensor, ("F", i, j), ("B", i, j)) if tensor.requires_grad else tensor

    def _evicted(self, column: int, value: Any) -> AbstractContextManager[object]:
        """Evict the tensors in ``value`` in a ``with`` block, in which the frame waits for the turn of ``column``.

        The model passes them from one module to the next, and holds them. Their memory is not the caller's.
        """
        i, j = self.frame.i, self.frame.column
        own = (tensor for _, tensor in each(value) if tensor.requires_grad and storage_key(tensor) not in self._callers)
        return self._residence.evicted(own, ("F", i, j), ("F", i, column))

    @contextmanager
    def _without_glue(self) -> Iterator[None]:
        """Switch the mode off for a ``with`` block, also if the model has put one of its own on top."""
        with without_function_mode(lambda mode: mode is self._glue):
            self._glue.is_off = True
            try:
                yield
            finally:
                self._glue.is_off = False


def _import_layers(cache: Any, layers: Sequence[int], change: Callable[[Tensor], Tensor]) -> None:
    """Import the layers of a cache that a module uses, in place: the model keeps the same cache.

    The layers of other modules stay where they are, or every column would copy all of them.
    """
    layers_of_cache = getattr(cache, "layers", None)
    if not isinstance(layers_of_cache, list):
        for inner in vars(cache).values():
            if is_cache(inner):
                _import_layers(inner, layers, change)
        return
    for layer in [layers_of_cache[k] for k in layers if k < len(layers_of_cache)]:
        for name, value in list(vars(layer).items()):
            if isinstance(value, Tensor):
                changed = change(value)
                if changed is not value:
                    setattr(layer, name, changed)


class RecomputationVisitor:
    """The visitor in a worker that runs backward: what is recomputed may reach doors again.

    Args:
        shared: what all frames share
        column: the column that is differentiated
    """

    def __init__(self, shared: Shared, column: int) -> None:
        self.owner = shared.owner
        self._shared, self._columns, self._column = shared, shared.columns, column

    def import_value(self, value: Any) -> Any:
        """Return ``value``: a recomputation has what the first run had."""
        return value

    def visit(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Copy the arguments, which are those of the first run, and call the module.

        Raises:
            RuntimeError: the module belongs to another device.
        """
        door = self._shared.here(door, self._column)
        if not self._columns.copies:
            return door.call_module(args, kwargs)
        if self._columns.crosses(self._column, door.column):
            names = self._columns.names
            raise RuntimeError(
                f"'{door.name}' belongs to {names[door.column]}, and a reentrant checkpoint around it began in "
                f"{names[self._column]}, on another device, which it cannot cross; use "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or checkpoint=[...] of pipelined"
            )
        return door.call_exchanged(args, kwargs, self._columns.copier(self._columns.devices[door.column]))


def unobserved() -> AbstractContextManager[object]:
    """Take the mode of a frame, or of a run in one piece, off the stack for a ``with`` block: tensors stay in place."""
    return without_function_mode(lambda mode: isinstance(mode, (Glue, InOnePiece)))


class InOnePiece(TorchFunctionMode):
    """The visitor of a run in one piece, in the caller's thread, which goes from device to device as the model does.

    Args:
        columns: the columns, some of them on different devices
        owner: the identity of the pipeline
        moved: is called with the column of each module of the spine
    """

    def __init__(self, columns: Columns, owner: Owner, moved: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        self.owner = owner
        self._moved = moved
        self._columns = columns
        self._change = columns.copier(columns.devices[0])
        self._is_off = False

    def import_value(self, value: Any) -> Any:
        """Return ``value`` on the device where the run is."""
        return mapped(value, self._copied)

    def visit(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Copy the arguments, and call the module."""
        self._moved(door.column)
        self._change = self._columns.copier(self._columns.devices[door.column])
        return door.call_exchanged(args, kwargs, self._copied)

    def _copied(self, tensor: Tensor) -> Tensor:
        self._is_off = True  # Asked for its device, a tensor would tell where it is needed.
        try:
            return self._change(tensor)
        finally:
            self._is_off = False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling() or self._is_off:
            return func(*args, **kwargs)
        if func in OF_THE_ORIGINAL or func in DIFFERENTIATES:  # A copy is no leaf, and has no ``.grad``.
            return func(*args, **kwargs)
        # What is changed in place stays where it is, or a copy would be changed in its place; the others come there.
        changed = kwargs["out"] if "out" in kwargs else args[:1] if changes_in_place(func) else ()
        devices = [self._columns.streams.device_of(tensor) for _, tensor in each(changed)]
        place = next((device for device in devices if device is not None and device in self._columns.devices), None)
        change = self._change if place is None else self._columns.copier(place)
        return func(*mapped(args, change), **mapped(kwargs, change))
