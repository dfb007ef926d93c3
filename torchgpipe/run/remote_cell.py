"""A cell whose imports may come from other processes, and whose exports may go there.

What has crossed forward with a graph crosses back as a gradient: the backward of a cell first receives the gradients
of what the cell has sent, from the last column down, as gradients arrive in one process; behind it, the cell sends the
gradients of what it has received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchgpipe.cell.cell import Arrival, Cell, Export, Source
from torchgpipe.cell.column import Column
from torchgpipe.devices.typing import Leaf
from torchgpipe.graph.function import Edge
from torchgpipe.offload.host_copies import Kept
from torchgpipe.processes.processes import Processes
from torchgpipe.processes.stand_in import Form
from torchgpipe.processes.tags import GRADIENTS, tag_of
from torchgpipe.processes.wire import size_of

__all__ = ["RemoteCell"]


class RemoteExport(Export):
    """See `Export`. Gradients are added from the last column down, as they arrive in one process.

    Those of this process arrive first here, whatever their columns.
    """

    __slots__ = ("_by_column",)

    def __init__(self, edge: Edge | None, column: int) -> None:
        super().__init__(edge, column)
        self._by_column: list[tuple[int, Kept]] = []

    def add_from(self, column: int, grad: Kept) -> None:
        """Take a gradient that arrives from a column."""
        if grad is not None:
            self._by_column.append((column, grad))

    def total(self) -> Leaf:
        """See `Arrival.total`."""
        for _, grad in sorted(self._by_column, key=lambda pair: -pair[0]):
            self.add(grad)
        self._by_column = []
        return super().total()


class FromColumn(Arrival):
    """The gradients of an export that arrive from one column of this process."""

    __slots__ = ("_export", "_from")

    def __init__(self, export: RemoteExport, column: int) -> None:
        super().__init__(export.column)
        self._export, self._from = export, column

    def add(self, grad: Kept) -> None:
        """See `Arrival.add`."""
        self._export.add_from(self._from, grad)


class RemoteCell(Cell):
    """See `Cell`.

    Args:
        processes: the processes
        i, column: see `Cell`

    Attributes:
        following: the cell of the column that is differentiated next, if its forward has ended
    """

    kind_of_export = RemoteExport

    def __init__(self, processes: Processes, i: int, column: Column) -> None:
        super().__init__(i, column)
        self._processes = processes
        self.following: RemoteCell | None = None
        #: By the column that has received them, the exports that were sent, with their forms.
        self._sent: dict[int, list[tuple[RemoteExport, Form]]] = {}
        #: By the column that they come from, the numbers of the imports that were received, with their forms.
        self._received: dict[int, list[tuple[int, Form]]] = {}

    def export(self, tensor: Tensor) -> RemoteExport:
        """See `Cell.export`."""
        export = super().export(tensor)
        assert isinstance(export, RemoteExport)
        return export

    def export_to(self, column: int, tensor: Tensor) -> Arrival:
        """Return what the gradient of a tensor arrives at from a column of this process."""
        return FromColumn(self.export(tensor), column)

    def note_sent(self, column: int, export: RemoteExport, form: Form) -> None:
        """Note that an export was sent to a column of another process."""
        self._sent.setdefault(column, []).append((export, form))

    def note_received(self, home: int, form: Form) -> Source:
        """Return where the gradient of the next import goes.

        Args:
            home: the column that it was received from
            form: its form
        """
        self._received.setdefault(home, []).append((len(self.sources), form))
        return None, Arrival()

    def arrived(self) -> list[Leaf]:
        """See `Cell.arrived`; what comes from other processes is received."""
        for c in sorted(self._sent, reverse=True):
            exports, forms = zip(*self._sent[c])
            source, tag = self._processes.owners[c], self._tag(self.column.partition, c)
            what = f"the gradient of micro-batch {self.i} of partition {c}"
            with self._processes.exchanging(what, [source]):
                grads = self._processes.messages.receive_tensors(size_of(forms), source, tag, forms[0].device)
            for export, grad in zip(exports, grads):
                export.add_from(c, grad)
        if self.following is not None:
            self.following.expect()
            self.following = None
        return super().arrived()

    def expect(self) -> None:
        """Expect the gradients of what was sent."""
        for c, pairs in self._sent.items():
            size, tag = size_of([form for _, form in pairs]), self._tag(self.column.partition, c)
            self._processes.messages.expect(size, self._processes.owners[c], tag)

    def differentiate(self, grads: Sequence[Leaf], *, keep_graph: bool = False, **others: Any) -> list[Leaf]:
        """See `Cell.differentiate`; the gradients of what was received are sent, and not returned."""
        result = super().differentiate(grads, keep_graph=keep_graph, **others)
        for a in sorted(self._received, reverse=True):
            numbers, forms = zip(*self._received[a])
            mine = [result[number] if result else None for number in numbers]
            for number in numbers if result else ():
                result[number] = None
            tag = self._tag(a, self.column.partition)
            self._processes.messages.send_tensors(mine, size_of(forms), self._processes.owners[a], tag, "gradients")
        self._processes.messages.ask()
        if not keep_graph:
            self._sent, self._received = {}, {}
        return result

    def _tag(self, a: int, c: int) -> int:
        return tag_of(GRADIENTS, self.i, a * len(self._processes.owners) + c)
