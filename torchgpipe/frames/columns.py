"""The columns of a mini-batch, and the routes between them. A column is a partition, or several on one device."""

from __future__ import annotations

from collections.abc import Callable, Container, Set
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from torchgpipe.devices import links
from torchgpipe.devices.stream import Stream, Streams
from torchgpipe.devices.torch_internals import own_call
from torchgpipe.frames.door import Door, Owner
from torchgpipe.frames.layout import Crossed
from torchgpipe.frames.settings import Settings, name_of
from torchgpipe.frames.twin import may_have_twin, twin_of
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.listener.listener import Listener
from torchgpipe.transport.route import Route

__all__ = ["Columns", "Shared", "copier"]


class Columns:
    """The columns of a mini-batch: where they compute, and the routes between them.

    Args:
        settings: the settings of the module
        streams: the source of streams
        listener: the listener of the mini-batch, if there is one

    Attributes:
        devices: the device of each column
        members: the numbers of the partitions of each column
        names: names each column by the numbers of its partitions, for errors
        labels: names each column with its modules and its device, for errors
        streams: the source of streams
        listener: the listener of the mini-batch, if there is one
        computing: the stream that each column computes on
        patience: the seconds after which a micro-batch that only waits is taken to wait for ever; None for no limit
    """

    def __init__(
        self, settings: Settings, streams: Streams, listener: Listener | None = None, patience: float | None = None
    ) -> None:
        self.devices, self.members, self.labels = settings.devices, settings.members, settings.labels
        self.names = list(map(name_of, settings.members))
        self.streams = streams
        self.listener = listener
        self.patience = patience
        self.computing: list[Stream] = [streams.current(device) for device in self.devices]
        self._routes = {
            (a, c): route
            for c, target in enumerate(self.computing)
            for a, source in enumerate(self.computing[:c])
            if (route := Route.between(source, target, streams, (a, c), listener)) is not None
        }

    def route(self, a: int, c: int) -> Route | None:
        """Return the route from column ``a`` to column ``c``, or None if they share a memory."""
        return self._routes.get((a, c))

    def crosses(self, a: int, c: int) -> bool:
        """Return whether the devices of two columns, in any order, have separate memory."""
        return (min(a, c), max(a, c)) in self._routes

    def leaving(self, a: int) -> list[Route]:
        """Return the routes that begin at column ``a``."""
        return [route for (source, _), route in self._routes.items() if source == a]

    def column_of(self, device: torch.device, before: int) -> int | None:
        """Return the last column on ``device`` in front of column ``before``, or None."""
        return next((a for a in range(before - 1, -1, -1) if self.devices[a] == device), None)

    def copier(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that copies a tensor from the device of any column to ``device``."""
        return copier(self.streams, device, self.devices)

    @property
    def copies(self) -> bool:
        """Whether tensors are copied from column to column."""
        return bool(self._routes)


class Shared(NamedTuple):
    """What the frames of a mini-batch share.

    Attributes:
        columns: where they compute
        aliases: the aliases of the model's parameters
        owner: the identity of the pipeline
        crossed: what the first micro-batch has carried from partition to partition
        again: the names of the modules that are called again in later columns
        twins: the twins of these modules, by their names and columns
    """

    columns: Columns
    aliases: Aliases
    owner: Owner
    crossed: list[Crossed]
    again: Set[str]
    twins: dict[tuple[str, int], nn.Module]

    def here(self, door: Door, column: int) -> Door:
        """Return the door that leads to a module in ``column``: that of a twin, if the module is called again there."""
        if door.column >= column or door.name not in self.again:
            return door
        if (door.name, column) not in self.twins:  # All micro-batches of a column have one thread at a time.
            if not may_have_twin(door.module):
                return door  # It has taken the place of another since the sample.
            copied = self.columns.copier(self.columns.devices[column])
            self.twins[door.name, column] = twin_of(door.module, column, self.aliases, copied)
        return cast(Door, own_call(self.twins[door.name, column]))


def copier(
    streams: Streams, device: torch.device, sources: Container[torch.device] | None = None
) -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor to ``device``, unless it is in that memory.

    Args:
        streams: tells what must be copied
        device: the device
        sources: the devices from which tensors are copied; None for all
    """

    def copied(tensor: Tensor) -> Tensor:
        source = streams.device_of(tensor)
        if source is None or (sources is not None and source not in sources) or not streams.moves(source, device):
            return tensor
        copy = links.to(tensor, device)
        # Under no_grad() a model may turn gradients on and differentiate its input, which has to be a leaf then.
        return copy if copy.requires_grad == tensor.requires_grad else copy.requires_grad_()

    return copied
