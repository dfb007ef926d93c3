"""The columns of a mini-batch, and what its frames share. A column is a partition, or several on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from torchgpipe.cell.column import Column
from torchgpipe.devices.stream import Streams
from torchgpipe.devices.torch_internals import own_call
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.listener.listener import Listener
from torchgpipe.replay.random_numbers import RandomNumbers
from torchgpipe.run.remote_doors import RemoteDoors
from torchgpipe.spine.door import Door, Owner
from torchgpipe.spine.layout import Crossed
from torchgpipe.spine.settings import Settings, name_of
from torchgpipe.spine.twin import may_have_twin, twin_of
from torchgpipe.transport.copier import copier
from torchgpipe.transport.route import Route

__all__ = ["Columns"]


class Columns(list[Column]):
    """The columns of a mini-batch, with the routes between them, and what its frames share.

    Args:
        settings: the settings of the module
        m: the number of micro-batches
        streams: the source of streams
        aliases: the aliases of the model's parameters
        owner: the identity of the pipeline
        listener: the listener of the mini-batch, if there is one
        random_numbers: the random numbers
        splits: whether the backward of a cell may be split. What is recomputed would be recomputed for each part of the
            second half
        patience: the seconds after which a micro-batch that only waits is taken to wait for ever; None for no limit

    Attributes:
        streams, aliases, owner, listener, random_numbers, patience: see above
        devices: the device of each column
        members: the numbers of the partitions of each column
        recomputed: the columns with modules that run again at backward
        checkpoint, has_stages: see `Settings`
        crossed: what the first micro-batch has carried from partition to partition
        copies: whether tensors are copied from column to column
    """

    def __init__(
        self,
        settings: Settings,
        m: int,
        streams: Streams,
        aliases: Aliases,
        owner: Owner,
        listener: Listener | None,
        *,
        splits: bool,
        random_numbers: RandomNumbers,
        patience: float | None,
        remote_doors: RemoteDoors | None,
    ) -> None:
        super().__init__()
        self.streams, self.aliases, self.owner = streams, aliases, owner
        self.listener, self.random_numbers, self.patience = listener, random_numbers, patience
        self.devices, self.members = settings.devices, settings.members
        self.checkpoint, self.has_stages = settings.checkpoint, settings.has_stages
        self.recomputed = {settings.column_of(name) for name in settings.recomputed}
        self.remote_doors = remote_doors
        self.processes = None if remote_doors is None else remote_doors.processes
        #: The places where glue has read values that one process has, each with what it called.
        self.reads: dict[str, str] = {}
        self.crossed: list[Crossed] = []
        self._again = settings.again
        #: The twins of modules that are called again in later columns, by their names and columns.
        self._twins: dict[tuple[str, int], nn.Module] = {}
        computing = list(enumerate(map(streams.current, self.devices)))
        for j, stream in computing:
            routes = [
                Route.between(stream, target, streams, (j, c), listener)
                for c, target in computing[j + 1 :]
                if self.is_mine(j) and self.is_mine(c)
            ]
            leaving = [route for route in routes if route is not None]
            self.append(Column(j, settings.labels[j], stream, m, listener, leaving, splits))
        self.copies = any([column.leaving for column in self])

    def is_mine(self, j: int) -> bool:
        """Return whether column ``j`` is in this process."""
        return self.processes is None or self.processes.is_mine(j)

    def name_of(self, j: int) -> str:
        """Return a name for a column, for errors."""
        return name_of(self.members[j])

    def route(self, a: int, c: int) -> Route | None:
        """Return the route from column ``a`` to column ``c``, or None if they share a memory."""
        return next((route for route in self[a].leaving if route.ends[1] == c), None)

    def on_device(self, device: torch.device, before: int) -> int | None:
        """Return the last column on ``device`` in front of column ``before``, or None."""
        return next((a for a in range(before - 1, -1, -1) if self.devices[a] == device), None)

    def copier(self, j: int) -> Callable[[Tensor], Tensor]:
        """Return a function that copies a tensor from the device of any column to that of column ``j``."""
        return copier(self.streams, self.devices[j], self.devices)

    def here(self, door: Door, j: int) -> Door:
        """Return the door that leads to a module in column ``j``: that of a twin, if it is called again there."""
        if door.column >= j or door.name not in self._again:
            return door
        if (door.name, j) not in self._twins:  # All micro-batches of a column have one thread at a time.
            if not may_have_twin(door.module):
                return door  # It has taken the place of another since the sample.
            self._twins[door.name, j] = twin_of(door.module, j, self.aliases, self.copier(j))
        return cast(Door, own_call(self._twins[door.name, j]))
