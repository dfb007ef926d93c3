"""What is known of a pipelined module, as plain data: names, partitions, devices, and how to split and join.

It lies on the module, so that copies and pickles of the module are pipelined, too. What runs is made anew from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.model.settings import CheckpointMode
from torchgpipe.model.values import dotted
from torchgpipe.offload.verify import Pin, Slots
from torchgpipe.processes.processes import Processes
from torchgpipe.schedule import Schedule, places_of
from torchgpipe.spine.layout import Layout
from torchgpipe.spine.sample import Study

__all__ = ["Settings", "find_door", "iterate_tensors", "name_of"]


@dataclass
class Settings:
    """The settings of a pipelined module.

    Attributes:
        chunks: the number of micro-batches
        devices: the device of each column; neighbouring partitions on one device are a column
        members: for each column, the numbers of its partitions
        labels: names each column with its modules and its device, for errors
        parts: for each column, the names of its parts of the spine
        doors: for each module of the spine, its column
        homes: for each parameter and buffer outside of these modules, its column
        again: the names of modules of the spine that the sample calls again in later columns
        users: for each parameter, the columns that use it, if there are several processes; of a new one, its column
        processes: the processes, which know the owner of each column; None for this one alone
        recomputed: the names of modules that keep only their inputs, and run again at backward
        schedule: the schedule of a step
        loss_fn: the loss function of a step, or None
        weight: the weight of a micro-batch, or None
        reduce: how numbers are joined: 'mean', 'sum', or None for what the sample shows
        study: what runs of the sample have shown
        layout: the layout, for people
        whole_target: whether every micro-batch gets the whole target
        may_differ: the names of outputs that may differ between rows together and rows apart
        offload: if weights live in host memory, the slots, the bytes that may be pinned, and whether activations wait
            there, too
        gathers: whether all processes get the outputs, and not numbers alone
        checkpoint: of stages, each of which one process alone has, the micro-batches that run again at backward; None
            for any other module, of which all do
    """

    chunks: int
    devices: list[torch.device]
    members: list[list[int]]
    labels: list[str]
    parts: list[list[str]]
    doors: dict[str, int]
    processes: Processes | None
    schedule: Schedule
    loss_fn: Callable[..., Any] | None
    weight: Callable[..., Any] | None
    study: Study
    layout: Layout
    homes: dict[str, int] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    users: dict[str, list[int]] = field(default_factory=dict)
    recomputed: set[str] = field(default_factory=set)
    reduce: str | None = None
    whole_target: bool = False
    may_differ: Collection[str] = ()
    offload: tuple[Slots, Pin, bool] | None = None
    gathers: bool = False
    checkpoint: CheckpointMode | None = None

    @property
    def has_stages(self) -> bool:
        """Whether the model is a row of stages, each of which one process alone has, and nothing runs between them."""
        return self.checkpoint is not None

    @property
    def places(self) -> list[int]:
        """The number of the place of each column: its device, in its process."""
        owners = [0] * len(self.devices) if self.processes is None else self.processes.owners
        return places_of([*zip(owners, self.devices)])

    def column_of(self, name: str) -> int:
        """Return the column of a module, parameter or buffer, given its name in the model."""
        if name in self.homes:
            return self.homes[name]
        door = find_door(name, self.doors)
        return 0 if door is None else self.doors[door]

    def slots(self, module: nn.Module) -> list[tuple[nn.Module, str, int]]:
        """Return every place of a parameter, each with its column."""
        return [
            (child, name, self.column_of(dotted(prefix, name)))
            for prefix, child in module.named_modules()
            for name in child._parameters
        ]


def find_door(name: str, doors: Container[str]) -> str | None:
    """Return the door in front of a module, parameter or buffer, given its name in the model; None if there is none."""
    while name and name not in doors:
        name = name.rpartition(".")[0]
    return name or None


def name_of(members: Sequence[int]) -> str:
    """Return a name for a column, made of the numbers of its partitions, for errors."""
    return f"partition {members[0]}" if len(members) == 1 else f"partitions {members[0]} to {members[-1]}"


def iterate_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield all places of parameters and buffers: the name in the model, the module, the name there, and the tensor."""
    for prefix, child in module.named_modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                yield dotted(prefix, name), child, name, tensor
