"""A frame: the run of the model's own forward on one micro-batch, which stops where a column begins.

A frame has a thread while it runs, whose stack keeps the state of the model's forward between two cells. The worker of
a device and a frame take turns, so that only one of the two runs:

    worker of device 0     F(0,0)──┐      ┌─►F(1,0)──┐
    frame 0                        └─ ... ┘          │         runs until it calls a module of column 1, and stops
    frame 1                                          └─ ...
    worker of device 1                    F(0,1)──┐            lets frame 0 go on
    frame 0                                       └─ ...       until it calls a module of column 2, or ends

In its thread, a frame stands where the model leaves its own code: at the doors of modules of the spine, whose arguments
it imports, and, as a function mode, at the operations between them, the glue. Within a module of the spine it is off,
because the arguments are imports.

A pipeline with one column needs no threads and no imports: its frames run in the thread that asks. So do those of a
process that has one column of several: they never stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe.cell.cell import Cell
from torchgpipe.devices.torch_internals import storage_key, without_function_mode
from torchgpipe.listener.listener import End
from torchgpipe.model.values import Exchanged, each, is_cache, mapped
from torchgpipe.offload.residence import Residence
from torchgpipe.replay.ambient import Ambient
from torchgpipe.run.carried import Carried
from torchgpipe.run.columns import Columns
from torchgpipe.run.imports import Imports
from torchgpipe.run.threads import Coroutine, Threads
from torchgpipe.spine.door import Door, this_thread, visiting
from torchgpipe.spine.glue import DIFFERENTIATES, OF_THE_ORIGINAL, TO_A_DEVICE, on_device
from torchgpipe.spine.recomputed import Keep

__all__ = ["Frame"]


class Frame(TorchFunctionMode):
    """A micro-batch on its way through the model.

    Args:
        i: the micro-batch
        begin: prepares the arguments of the model, and calls `run` in this frame's thread
        ambient: the settings of the caller
        threads: where frames run; None if they run in the thread that asks
        columns: the columns, and what all frames share
        cells: the cells of the frame, by column; empty if there is no backward
        residence: which tensors are on their devices
        carried: what the frame takes over from the one before, if they are chunks of one sequence

    Attributes:
        i: the micro-batch
        owner: the identity of the pipeline
        module: the name of the module of the spine that was called last, for errors; '' before the first call
        imports: the imports, which know the column of the frame, and have its cells until it ends
        recomputes: whether modules in the present column run again at backward that can
        callers: the storages of the model's arguments, by key, which are not to be evicted: they are the caller's
    """

    kind_of_imports = Imports

    def __init__(
        self,
        i: int,
        begin: Callable[[Frame], None],
        ambient: Ambient,
        threads: Threads | None,
        columns: Columns,
        cells: list[Cell],
        residence: Residence,
        carried: Carried | None,
    ) -> None:
        super().__init__()
        self.i, self.owner, self.module = i, columns.owner, ""
        self.imports = self.kind_of_imports(i, cells, columns)
        self.callers: set[int] = set()
        self.recomputes = True
        self._begin, self._ambient, self._columns, self._residence = begin, ambient, columns, residence
        self._cells, self._carried = cells, carried
        # The first one waits for no other: for a file, perhaps.
        patience = columns.patience if i else None
        self._coroutine = None if threads is None else Coroutine(threads, i, patience)
        #: The column that the frame has stopped in front of.
        self._wanted = 0
        self._end_of_work: End | None = None
        self._current_stream = ExitStack()
        self._is_off = False

    @property
    def column(self) -> int:
        """The column whose turn it is."""
        return self.imports.column

    # ---------------------------------------------------------------------------------------- in the thread of a worker

    def advance(self, j: int) -> None:
        """Let the model run as far as it belongs to column ``j``.

        Raises:
            BaseException: what the model has raised.
        """
        if self._coroutine is None:
            self._go()
        elif not self._coroutine.has_ended and self._wanted <= j:  # Else the frame passes this column by.
            self._coroutine.resume(self._go)

    def end_pause(self) -> None:
        """Wait until the model has come to where it stops, or to its end; a frame of one process has."""

    def cancel(self) -> None:
        """Unwind the stack of a frame that has not finished, and wait until that is done."""
        if self._coroutine is not None:
            self._coroutine.cancel()

    # -------------------------------------------------------------------------------------- in the thread of the frame

    def _go(self) -> None:
        self._ambient.run(self._go_in_ambient)

    def _go_in_ambient(self) -> None:
        failed = True
        try:
            # A model that differentiates makes nodes, which have numbers of this thread only if it is this thread.
            with torch.autograd.set_multithreading_enabled(False):
                self._enter(0)
                self._begin(self)
                self._leave(ends=True)
            failed = False
        finally:
            self.end_work(failed=failed)
            self.imports.end()  # Later frames may run in settings that hold this object.
            if self._carried is not None:
                self._carried.forget(self.i)
            self._cells, self._carried = [], None

    def run(self, model: Callable[[], Any], finish: Callable[[Any], None]) -> None:
        """Run the model, and pass its output to ``finish`` in the last column."""
        with visiting(self):
            self.begin_work()
            if len(self._columns) == 1:
                finish(model())
                return
            has_glue = self.imports.are_needed and not self._columns.has_stages
            with self._current_stream, self if has_glue else nullcontext():
                self._current_stream.enter_context(self._columns[0].stream.use())
                output = model()
                with self._without_glue():
                    self.go_to(len(self._columns) - 1, "the end")
                self.begin_work()
                finish(output)

    def begin_work(self) -> None:
        """Tell a listener that the model computes in this column now, unless it has been told."""
        column = self._columns[self.imports.column]
        if column.listener is not None and self._end_of_work is None:
            self._end_of_work = column.listener.begin("forward", self.i, column.j, None, column.stream)

    def end_work(self, *, failed: bool) -> None:
        """Tell a listener that the model stops or ends here."""
        if self._end_of_work is not None:
            end, self._end_of_work = self._end_of_work, None
            end(failed)

    def go_to(self, column: int, name: str) -> None:
        """Stop until it is the turn of ``column``.

        Raises:
            RuntimeError: the column is an earlier one.
        """
        here = self.imports.column
        if column == here:
            return
        if column < here:
            there, reached = map(self._columns.name_of, (column, here))
            raise RuntimeError(
                f"'{name}' belongs to {there}, but the model has called it after modules of {reached}, which it did "
                f"not do with the sample; give a sample that takes this way, or a balance that keeps '{name}' and what "
                "is called before it in one partition"
            )
        self.imports.forget()
        self._leave()
        self.end_work(failed=False)
        if self._stops_before(column):
            assert self._coroutine is not None
            self._wanted = column
            self._coroutine.pause()
        self._enter(column)
        self._current_stream.enter_context(self._columns[column].stream.use())

    def _stops_before(self, column: int) -> bool:
        """Return whether the frame waits for the turn of a column."""
        return True

    def _enter(self, column: int) -> None:
        self.imports.enter(column)
        if self._carried is not None:
            self._carried.enter(self.i, column, self._cells[column] if self._cells else None)

    def _leave(self, *, ends: bool = False) -> None:
        if self._carried is not None:
            self._carried.leave(self.i, self.column, self._cells[self.column] if self._cells else None, ends=ends)

    # ----------------------------------------------------------------------------------------------------- at its doors

    def import_value(self, value: Any) -> Any:
        """Return ``value`` with all its tensors in the present column."""
        if not self.imports.are_needed:
            return value
        with self._without_glue():
            return mapped(value, self.imports.import_tensor)

    def visit(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Stop at ``door`` until it is the turn of its column, import the arguments, and call the module."""
        self.module = door.name
        if len(self._columns) == 1:
            return door.call_module(args, kwargs, self._keep, recomputes=self.recomputes)
        imports = self.imports
        if self._is_off:  # Within a module of the spine, whose arguments are imports.
            return self._columns.here(door, imports.column).call_module(args, kwargs)
        with self._without_glue():
            door = self._columns.here(door, imports.column)
            if door.column != imports.column:
                with self._evicted(door.column, (args, kwargs)):
                    self.go_to(door.column, door.name)
            return self._visit_here(door, args, kwargs)

    def _visit_here(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Import the arguments into the present column, and call the module."""
        imports, exchanged = self.imports, None
        if imports.begin_here:
            exchanged = self._exchanged(args, kwargs)
            args, kwargs = exchanged.args, exchanged.kwargs
            self._import_caches(door, args, kwargs)
        output = self._call(door, args, kwargs)
        if exchanged is not None:
            exchanged.hand_over()
        if self._columns.copies:
            for _, tensor in each(output):
                imports.mark_made(tensor)
        return output

    def _exchanged(self, args: Any, kwargs: Any) -> Exchanged:
        return Exchanged(args, kwargs, self.imports.import_tensor)

    def _import_caches(self, door: Door, args: Any, kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if is_cache(value):
                _import_layers(value, door.layers, self.imports.import_tensor)

    def _call(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Call the module behind a door of this column; its arguments are imports."""
        self.begin_work()  # Here, as an accelerator has waited for the arguments before.
        again = self._cells[door.column].second_runs if self._cells else None
        return door.call_module(args, kwargs, self._keep, again, recomputes=self.recomputes)

    @property
    def _keep(self) -> Keep | None:
        """What returns what is kept of an argument until its module runs again; None if that is the argument."""
        if not self._residence.has_copies:
            return None
        i, j, keep = self.i, self.imports.column, self._residence.keep
        # Cells share tensors without grad, such as masks.
        return lambda tensor: keep(tensor, ("F", i, j), ("B", i, j)) if tensor.requires_grad else tensor

    def _evicted(self, column: int, value: Any) -> AbstractContextManager[object]:
        """Evict the tensors in ``value`` in a ``with`` block, in which the frame waits for the turn of ``column``.

        The model passes them from one module to the next, and holds them. Their memory is not the caller's.
        """
        own = (tensor for _, tensor in each(value) if tensor.requires_grad and storage_key(tensor) not in self.callers)
        return self._residence.evicted(own, ("F", self.i, self.imports.column), ("F", self.i, column))

    # -------------------------------------------------------------------------------------------------------- its glue

    @contextmanager
    def _without_glue(self) -> Iterator[None]:
        """Switch the mode off for a ``with`` block, also if the model has put one of its own on top."""
        with without_function_mode(lambda mode: mode is self):
            outer, self._is_off = self._is_off, True
            try:
                yield
            finally:
                self._is_off = outer

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The compiler would keep what it finds here. `is_compiling` is true in all threads while one of them compiles.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        # A pipeline within the model has visitors of its own, and carries this mode to its threads.
        if self._is_off or this_thread.visitor is not self or func in OF_THE_ORIGINAL:
            return func(*args, **kwargs)
        imports, devices = self.imports, self._columns.devices
        if "device" in kwargs or func in TO_A_DEVICE:
            args, kwargs = on_device(func, args, kwargs, devices[imports.column], devices)
        if not imports.column:
            return func(*args, **kwargs)
        if func in DIFFERENTIATES:
            raise RuntimeError(
                "the model computes gradients in its forward, behind a boundary between partitions, where the graph is "
                "cut; let one module do all of it, or give a balance that keeps it in the first partition"
            )
        args = mapped(args, imports.import_tensor)
        if kwargs:
            kwargs = mapped(kwargs, imports.import_tensor)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            imports.mark_made(result)
        return result


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
