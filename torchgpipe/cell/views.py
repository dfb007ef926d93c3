"""Views on the layers of a pipeline that divide or join its partitions, so that cells are smaller or larger.

    partitions    a b c │ d e │ f g
    divided       a │ b │ c │ d e │ f g      where checkpoint names 'b': each named layer is alone
    joined        a b c   d e │ f g          in a step, where neighbours are on one device, and nothing keeps them apart

The engine knows cells of views. Errors and timelines name the partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import torch

from torchgpipe.batch.microbatch import Batch
from torchgpipe.devices.torch_internals import has_call_hooks, is_compiled
from torchgpipe.model.partition import Partition

__all__ = ["Joined", "divide", "joinable", "starts_in_place", "views_of_each"]


def divide(partitions: Sequence[Partition], alone: Set[str]) -> list[Partition]:
    """Return views in which each layer of these names is alone, in the order of the layers.

    Neighbouring layers of other names stay together. A partition that need not be divided is its own view.

    Args:
        partitions: the partitions
        alone: names of layers

    Raises:
        ValueError: a partition would have to be divided that is compiled or has hooks, so that it runs as a whole.
    """
    views = []
    for partition in partitions:
        runs: list[list[str]] = []
        for name in partition._modules:
            if runs and alone.isdisjoint([name, runs[-1][-1]]):
                runs[-1].append(name)
            else:
                runs.append([name])
        if len(runs) == 1:
            views.append(partition)
            continue
        if _runs_as_a_whole(partition):
            raise ValueError(
                f"checkpoint names layers of partition {partition._index}, which is compiled or has hooks and so runs "
                "as a whole; compile its layers and give hooks to them, or use a checkpoint mode"
            )
        for run in runs:
            view = type(partition)()
            view._index, view.training = partition._index, partition.training
            view._modules.update({name: partition._modules[name] for name in run})
            views.append(view)
    return views


def views_of_each(views: Sequence[Partition]) -> list[list[int]]:
    """Return for each partition the positions of its views."""
    positions: dict[int, list[int]] = {}
    for position, view in enumerate(views):
        positions.setdefault(view._index, []).append(position)
    return list(positions.values())


class Joined(Partition):
    """Neighbouring partitions as one.

    Args:
        parts: the partitions
    """

    def __init__(self, parts: Sequence[Partition]) -> None:
        super().__init__()
        self.training = parts[0].training
        self._index = parts[0]._index
        # In a tuple, because a module would become a layer.
        self._parts = tuple(parts)
        #: The part that runs forward; None while none does.
        self._runs: list[Partition | None] = [None]
        for part in parts:  # Last, because a layer may have the name of one of these attributes.
            self._modules.update(part._modules)

    @property
    def _running(self) -> Partition:
        return self._runs[0] or self._parts[0]

    @property
    def _label(self) -> str:
        """The part that runs forward, or else all of them: backward does not tell where it has come to."""
        if self._runs[0] is not None:
            return self._runs[0]._label
        names, first, last = list(self._modules), self._parts[0], self._parts[-1]
        return f"partitions {first._index} to {last._index} (layers '{names[0]}'..'{names[-1]}')"

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        first, *others = self._parts
        self._runs[0] = first
        value = first.forward(*inputs, **keywords)
        for part in others:
            Batch.of(value, f"the output of {self._label}")  # Refuses what is no value between partitions.
            self._runs[0] = part
            value = part.forward(value)
        self._runs[0] = None
        return value


def joinable(
    views: Sequence[Partition], devices: Sequence[torch.device], checkpointed: Sequence[int]
) -> tuple[bool, ...]:
    """Return for each view whether it may be joined with the next one, which changes no result and no memory.

    Args:
        views: the views
        devices: the device of each view
        checkpointed: for each view, how many micro-batches may be recomputed
    """
    alike = [a == b and not (s or t) for a, b, s, t in zip(devices, devices[1:], checkpointed, checkpointed[1:])]
    if not any(alike):
        return (False,) * len(views)
    # Gradients of shared parameters are summed view by view. A view that starts in place runs on a copy.
    counts = Counter([parameter for view in views for parameter in view.parameters()])
    free = [
        not (_runs_as_a_whole(view) or any([counts[parameter] > 1 for parameter in view.parameters()]))
        for view in views
    ]
    return (
        *[joins and free[k] and free[k + 1] and not starts_in_place(views[k + 1]) for k, joins in enumerate(alike)],
        False,
    )


def starts_in_place(layer: torch.nn.Module) -> bool:
    """Return whether the first layer says that it changes its input."""
    while isinstance(layer, torch.nn.Sequential) and layer._modules:
        (layer, *_) = layer._modules.values()  # Indexing a Sequential takes several times as long.
    return bool(getattr(layer, "inplace", False))


def _runs_as_a_whole(partition: Partition) -> bool:
    return is_compiled(partition) or has_call_hooks(partition)
