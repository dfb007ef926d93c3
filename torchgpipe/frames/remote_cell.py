"""A cell whose imports may come from other processes, and whose exports may go there.

What has crossed forward with a graph crosses back as a gradient: the backward of a cell first receives the gradients
of what the cell has sent, from the last column down, as gradients arrive in one process; behind it, the cell sends the
gradients of what it has received.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchgpipe.cell.cell import Arrival, Cell, Export, Source
from torchgpipe.cell.column import Column
from torchgpipe.devices.typing import Leaf
from torchgpipe.processes.processes import Processes
from torchgpipe.processes.stand_in import Form
from torchgpipe.processes.tags import GRADIENTS, tag_of

__all__ = ["RemoteCell"]


class RemoteCell(Cell):
    """See `Cell`.

    Args:
        i: the micro-batch
        column: the column
        processes: the processes

    Attributes:
        following: the cell of the column that is differentiated next, if its forward has ended
    """

    __slots__ = ("_processes", "_received", "_sent", "following")

    def __init__(self, i: int, column: Column, processes: Processes) -> None:
        super().__init__(i, column)
        self._processes = processes
        self.following: RemoteCell | None = None
        #: By the column that has received them, the exports that were sent, with their forms.
        self._sent: dict[int, list[tuple[Export, Form]]] = {}
        #: By the column that they come from, the numbers of the imports that were received, with their forms.
        self._received: dict[int, list[tuple[int, Form]]] = {}

    def note_sent(self, column: int, export: Export, form: Form) -> None:
        """Note that an export was sent to a column of another process."""
        self._sent.setdefault(column, []).append((export, form))

    def note_received(self, home: int, form: Form) -> Source:
        """Return where the gradient of the next import goes, which was received from column ``home``."""
        self._received.setdefault(home, []).append((len(self.sources), form))
        return None, Arrival()

    def arrived(self) -> list[Leaf]:
        """See `Cell.arrived`; what comes from other processes is received."""
        for c in sorted(self._sent, reverse=True):
            exports, forms = zip(*self._sent[c])
            source, tag = self._processes.owners[c], self._tag(self.column.j, c)
            what = f"the gradient of micro-batch {self.i} of partition {c}"
            with self._processes.exchanging(what, [source]):
                grads = self._processes.messages.receive_gradients(forms, source, tag)
            for export, grad in zip(exports, grads):
                export.add(grad)
        if self.following is not None:
            self.following.expect()
            self.following = None
        return super().arrived()

    def expect(self) -> None:
        """Expect the gradients of what was sent."""
        for c, pairs in self._sent.items():
            forms = [form for _, form in pairs]
            self._processes.messages.expect_gradients(forms, self._processes.owners[c], self._tag(self.column.j, c))

    def differentiate(self, grads: Sequence[Leaf], *, split: bool = False, keep_graph: bool = False) -> list[Leaf]:
        """See `Cell.differentiate`; the gradients of what was received are sent, and not returned."""
        result = super().differentiate(grads, split=split, keep_graph=keep_graph)
        for a in sorted(self._received, reverse=True):
            numbers, forms = zip(*self._received[a])
            mine = [result[number] if result else None for number in numbers]
            for number in numbers if result else ():
                result[number] = None
            self._processes.messages.send_gradients(mine, forms, self._processes.owners[a], self._tag(a, self.column.j))
        self._processes.messages.ask()
        if not keep_graph:
            self._sent, self._received = {}, {}
        return result

    def _tag(self, a: int, c: int) -> int:
        return tag_of(GRADIENTS, self.i, a * len(self._processes.owners) + c)
