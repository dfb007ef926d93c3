"""Look up what one call of a pipeline needs: streams, routes, portals, and what the cells of a partition share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from torchgpipe.devices.stream import Streams
from torchgpipe.engine.copy import Route
from torchgpipe.engine.label import labelled
from torchgpipe.engine.partition_call import PartitionCall
from torchgpipe.engine.portal import Portal
from torchgpipe.engine.record import Listener, Place, Recorder
from torchgpipe.model.partition import Partition
from torchgpipe.model.views import views_of_each
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.schedule import Program
from torchgpipe.skip.layout import SkipLayout

__all__ = ["Mechanisms", "begin_step", "make_calls"]


@dataclass(frozen=True)
class Mechanisms:
    """The mechanisms of a pipeline beside its schedule. A test or a benchmark can exchange each of them.

    Attributes:
        streams: the source of streams
        dependency: whether to fix the order of micro-batches at backward
        recorder: the listener to what runs when, if there is one
    """

    streams: Streams = field(default_factory=Streams)
    dependency: bool = True
    recorder: Recorder | None = None


def begin_step(
    m: int,
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    mechanisms: Mechanisms,
    program: Program | None = None,
) -> Listener | None:
    """Return the listener of a mini-batch of ``m`` micro-batches, or None."""
    if mechanisms.recorder is None:
        return labelled(None)
    streams = [mechanisms.streams.current(device) for device in devices]
    places = [
        Place(streams[views[0]], [name for view in views for name in partitions[view]._modules])
        for views in views_of_each(partitions)
    ]
    return labelled(mechanisms.recorder.begin_step(m, places, program))


def make_calls(
    partitions: Sequence[Partition],
    devices: Sequence[torch.device],
    modules: Sequence[list[nn.Module]],
    mechanisms: Mechanisms,
    random: Callable[[torch.device, list[nn.Module]], RandomStates],
    *,
    ambient: Ambient,
    ordered: bool,
    replicated: bool = False,
    in_program: bool = False,
    listener: Listener | None,
) -> list[PartitionCall]:
    """Return what the cells of each partition share during a call.

    Args:
        partitions: the layers, on their devices
        devices: the device of each partition
        modules: all modules in each partition
        mechanisms: the mechanisms of the pipeline
        random: makes the notes of random numbers, for a device and all modules on it
        ambient: the caller's settings
        ordered: whether cells have to be tied to each other, because several threads run them
        replicated: whether DistributedDataParallel is around the call
        in_program: whether a program runs backward, while the layers have aliases of their parameters
        listener: the listener of the mini-batch, if there is one
    """
    streams = mechanisms.streams
    computing = [streams.current(device) for device in devices]

    def route(a: int, c: int, load: str = "") -> Route | None:
        ends = partitions[a]._index, partitions[c]._index
        return Route.between(computing[a], computing[c], streams, ends, listener, load)

    routes = [route(j, j + 1) for j in range(len(partitions) - 1)]
    skips = SkipLayout(modules)
    portals = {key: Portal(key, route(a, c, "skip ")) for ends in skips.leaving for key, a, c in ends}
    there: dict[torch.device, list[nn.Module]] = {device: [] for device in devices}
    for device, own in zip(devices, modules):
        there[device] += own
    states = {device: random(device, own) for device, own in there.items()}
    return [
        PartitionCall(
            partition,
            modules[j],
            computing[j],
            arriving=routes[j - 1] if j > 0 else None,
            leaving=routes[j] if j < len(routes) else None,
            sending=[portals[key] for key, _, _ in skips.leaving[j]],
            receiving=[portals[key] for key, _, _ in skips.arriving[j]],
            ambient=ambient,
            random=states[devices[j]],
            ordered=ordered,
            replicated=replicated,
            in_program=in_program,
            listener=listener,
        )
        for j, partition in enumerate(partitions)
    ]
