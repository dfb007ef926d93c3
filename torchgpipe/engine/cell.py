"""One micro-batch on one partition: runs the layers, and reports failures and progress with their place.

A cell does not know what schedules it, and keeps no tensor: only the structure of its input and its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torchgpipe.devices.typing import Leaves
from torchgpipe.engine.out_of_memory import add_shortage
from torchgpipe.engine.partition_call import PartitionCall
from torchgpipe.engine.record import Kind, recorded
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.state import note_changes
from torchgpipe.schedule import Action

__all__ = ["Cell"]


class Cell:
    """Micro-batch ``i`` of ``m`` on the partition of ``call``."""

    __slots__ = ("_input", "_output", "call", "i", "m")

    def __init__(self, call: PartitionCall, i: int, m: int) -> None:
        self.call = call
        self.i = i
        self.m = m

    def begin(self, batch: Batch) -> None:
        """Note the structure of the input, for `compute`."""
        self._input = batch.replace(())

    def compute(self, leaves: Leaves) -> Leaves:
        """Run the layers on the leaves of the input, and return the leaves of the output."""
        output = self.call.run_layers(self._input.replace(leaves))
        leaves = output.leaves
        output.leaves = ()  # `end` needs the structure. With the leaves in it, the cell would keep its output alive.
        self._output = output
        return leaves

    def end(self, leaves: Leaves) -> Batch:
        """Return the output with these leaves, in the structure that the layers have returned."""
        return self._output.replace(leaves)

    def recorded(self, kind: Kind) -> AbstractContextManager[None]:
        """Tell the listener of the mini-batch, if there is one, what runs in a ``with`` block."""
        call = self.call
        return recorded(call.listener, kind, self.i, call.j, None, call.stream)

    @contextmanager
    def differentiating(self, kind: Kind = "backward") -> Iterator[None]:
        """Tell the listener of a backward, or half of one, in a ``with`` block, and add a note to its errors."""
        try:
            with self.recorded(kind):
                yield
        except BaseException as error:
            self.failed(error, kind)
            raise

    def failed(self, error: BaseException, phase: str) -> None:
        """Add a note to ``error`` that tells the cell and the phase, such as forward."""
        note = f"micro-batch {self.i} of {self.m}, {self.call.where}, during {phase}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
            note_changes(error)
        if self.call.facts is not None:
            action = Action("F" if phase == "forward" else "B", self.i, self.call.running)
            add_shortage(error, self.call.facts, action, self.call.device)
