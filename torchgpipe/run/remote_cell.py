"""A cell whose imports may come from other processes, and whose exports may go there.

What has crossed forward with a graph crosses back as a gradient: the backward of a cell first receives the gradients
of what the cell has sent, from the last column down, as gradients arrive in one process; behind it, the cell sends the
gradients of what it has received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchgpipe.cell.cell import Arrival, Cell, Export, Source
from torchgpipe.cell.column import Column
from torchgpipe.devices.typing import Leaf
from torchgpipe.graph.function import Edge
from torchgpipe.offload.host_copies import Kept
from torchgpipe.processes.processes import Processes

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
    """

    kind_of_export = RemoteExport

    def __init__(self, processes: Processes, i: int, column: Column) -> None:
        super().__init__(i, column)
        self._processes = processes
        #: By the column that has received them, the exports that were sent, with their devices.
        self._sent: dict[int, list[tuple[RemoteExport, torch.device]]] = {}
        #: By the column that they come from, the numbers of the imports that were received.
        self._received: dict[int, list[int]] = {}

    def export_to(self, column: int, tensor: Tensor) -> Arrival:
        """Return what the gradient of a tensor arrives at from a column of this process."""
        return FromColumn(cast(RemoteExport, self.export(tensor)), column)

    def note_sent(self, column: int, tensor: Tensor) -> None:
        """Note that a tensor was sent to a column of another process."""
        self._sent.setdefault(column, []).append((cast(RemoteExport, self.export(tensor)), tensor.device))

    def note_received(self, home: int) -> Source:
        """Return where the gradient of the next import goes, which was received from column ``home``."""
        self._received.setdefault(home, []).append(len(self.sources))
        return None, Arrival()

    def arrived(self) -> list[Leaf]:
        """See `Cell.arrived`; what comes from other processes is received."""
        for c in sorted(self._sent, reverse=True):
            exports, devices = zip(*self._sent[c])
            what, key = f"the gradient of micro-batch {self.i} of partition {c}", self._key(self.column.partition, c)
            grads = self._processes.receive(self._processes.owners[c], key, what, device=devices[0])
            for export, grad in zip(exports, grads):
                export.add_from(c, grad)
        return super().arrived()

    def differentiate(self, grads: Sequence[Leaf], *, keep_graph: bool = False, **others: Any) -> list[Leaf]:
        """See `Cell.differentiate`; the gradients of what was received are sent, and not returned."""
        result = super().differentiate(grads, keep_graph=keep_graph, **others)
        for a in sorted(self._received, reverse=True):
            numbers = self._received[a]
            mine = [result[number] if result else None for number in numbers]
            for number in numbers if result else ():
                result[number] = None
            self._processes.send(mine, [self._processes.owners[a]], self._key(a, self.column.partition), "gradients")
        if not keep_graph:
            self._sent, self._received = {}, {}
        return result

    def _key(self, a: int, c: int) -> str:
        return f"gradients {self.i} {a} {c}"
