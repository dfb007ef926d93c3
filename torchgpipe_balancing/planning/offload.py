"""Plan a pipeline whose weights live in host memory: partitions, micro-batches, and whether to recompute.

Nothing is measured: what fits follows from bytes. As few partitions as fit go round the devices, under 'LayerMajor';
layers are recomputed only if they do not fit otherwise. A device has to hold, for partitions of layers

    twice the largest weights, one for each slot,  three times the largest gradients,  all buffers
    with recomputation: the largest kept of a layer, and four times the inputs of the layers of a partition
    without: all that its layers keep, for each micro-batch
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import torch
from torch import nn

from torchgpipe.devices.memory import shown_size
from torchgpipe.schedule import program
from torchgpipe.schedule.residency import residency
from torchgpipe_balancing.partition import partition
from torchgpipe_balancing.planning.candidates import rows_of
from torchgpipe_balancing.planning.costs import Costs
from torchgpipe_balancing.planning.counting import count_bytes
from torchgpipe_balancing.planning.measure import make_costs
from torchgpipe_balancing.planning.model_under_test import Config, ModelUnderTest, apply
from torchgpipe_balancing.planning.problem import CellCosts, Device, Layer, Problem

__all__ = ["MOST_PARTITIONS", "OffloadPlan", "plan_offload"]

#: The partitions whose weights have room on a device at a time: one computes while the other's weights come. More slots
#: for smaller partitions would move as much.
_SLOTS = 2

#: As many as there are layers, for any model.
MOST_PARTITIONS = 1024


@dataclass(frozen=True)
class OffloadPlan:
    """A plan for a pipeline whose weights live in host memory; print it, or apply it.

    Attributes:
        balance: the number of layers in each partition
        devices: the devices, which partitions use in turn
        chunks: the number of micro-batches
        recomputes: whether all layers are recomputed
        memory: for each device, the bytes that it needs
        bytes_up: the bytes of weights that go to the devices in a step
        bytes_down: the bytes of gradients that come back
        layers: the names of the modules of each layer
    """

    balance: tuple[int, ...]
    devices: tuple[torch.device, ...]
    chunks: int
    recomputes: bool
    memory: tuple[float, ...]
    bytes_up: int
    bytes_down: int
    layers: tuple[tuple[str, ...], ...]
    _sample: Any = field(default=None, repr=False, compare=False)
    _options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def apply(self, model: nn.Module, **options: Any) -> Any:
        """Pipeline a model as planned; see `Plan.apply`."""
        places = [self.devices[j % len(self.devices)] for j in range(len(self.balance))]
        recomputed = range(len(self.layers)) if self.recomputes else ()
        way = Config(self.balance, places, self.chunks, "LayerMajor", recomputed)
        arguments = {**self._options, "offload": True, "slots": _SLOTS, **options}
        return apply(model, self.layers, way, self._sample, arguments)

    def __str__(self) -> str:
        held = ", ".join(f"{shown_size(size)} on {device}" for device, size in zip(self.devices, self.memory))
        return (
            f"{len(self.balance)} partitions, {_SLOTS} slots, chunks={self.chunks}, "
            f"{'with' if self.recomputes else 'without'} recomputation\n"
            f"a step moves {shown_size(self.bytes_up)} up and {shown_size(self.bytes_down)} down\n"
            f"needs {held}"
        )


def plan_offload(
    tested: ModelUnderTest,
    sample: Any,
    batch: int,
    planned: Sequence[Device],
    chunks: Sequence[int],
    recompute: Sequence[bool],
    options: Mapping[str, Any],
) -> tuple[OffloadPlan | None, float]:
    """Plan for weights in host memory; see :func:`torchgpipe.plan`.

    Args:
        tested: the model, with layers for `MOST_PARTITIONS`
        sample: the sample for the pipeline
        batch: the rows of a mini-batch
        planned: the devices
        chunks: the numbers of micro-batches to try
        recompute: whether to try it with recomputation, without, or both
        options: further arguments of the pipeline

    Returns:
        the plan with the fewest bytes up, and the bytes of memory that the one with the least needs on a device
    """
    costs = _counted(tested, rows_of(batch, max(chunks)))
    best, least, n = None, math.inf, len(planned)
    sizes = [1 + layer.parameters for layer in costs.layers]
    speeds = [[1 / planned[j % n].slowness for j in range(count)] for count in _numbers(n, len(sizes))]
    balances = [partition(sizes, speeds=of_places) for of_places in speeds]
    for recomputes, count, balance in product(sorted(recompute), chunks, balances):
        made = _made(costs, planned, batch, count, balance, recomputes=recomputes)
        least = min(least, max(made.memory))
        fits = all(size <= device.memory for size, device in zip(made.memory, planned))
        # Recomputation is for what does not fit otherwise.
        if fits and (best is None or (best.recomputes == recomputes and made.bytes_up < best.bytes_up)):
            best = replace(made, _sample=sample, _options=options)
    return best, least


def _numbers(n: int, layers: int) -> Iterator[int]:
    """Yield the numbers of partitions to try: some that devices share evenly, and one for each layer."""
    count = n
    while count < layers:
        yield count
        count += max(1, count // (2 * n)) * n
    yield layers


def _made(
    costs: Costs, devices: Sequence[Device], batch: int, chunks: int, balance: Sequence[int], *, recomputes: bool
) -> OffloadPlan:
    """Return a plan with these partitions and so many micro-batches, which may not fit."""
    n, rows = len(devices), rows_of(batch, chunks)
    places = [j % n for j in range(len(balance))]
    spans = list(pairwise(accumulate(balance, initial=0)))
    weights = [sum([layer.parameters for layer in costs.layers[a:b]]) for a, b in spans]
    trained = [sum([layer.trained for layer in costs.layers[a:b]]) for a, b in spans]
    actions = program("LayerMajor", math.ceil(batch / rows), places)
    problem = Problem(costs.layers_at(rows, states=0.0), tuple(devices), tuple(places), actions)
    recomputed = range(len(costs.layers) if recomputes else 0)
    taken = [problem.partition_cost(j, *span, recomputed) for j, span in enumerate(spans)]
    held = []
    for k in range(n):
        placed = slice(k, None, n)
        kept = [cost.kept for cost in taken[placed]]
        state = sum([cost.state for cost in taken[placed]]) + 3 * max(trained[placed], default=0)
        room = max([cost.room for cost in taken[placed]], default=0.0) + 4 * max(kept, default=0.0)
        state -= sum(sorted(weights[placed])[:-_SLOTS])  # These are in host memory.
        held.append(state + (room if recomputes else problem.m * sum(kept)))
    stays = residency(actions, _SLOTS)
    return OffloadPlan(
        balance=tuple(balance),
        devices=tuple([torch.device(device.name) for device in devices]),
        chunks=chunks,
        recomputes=recomputes,
        memory=tuple(held),
        bytes_up=stays.bytes_up(weights),
        bytes_down=stays.bytes_down(trained),
        layers=tuple([layer.modules for layer in costs.layers]),
    )


def _counted(tested: ModelUnderTest, rows: int) -> Costs:
    """Return what each layer keeps as a partition of its own: none has memory from another one."""
    counts = count_bytes(tested, partial(tested.plain, rows))
    layers = [
        replace(layer, kept=layer.kept + layer.again, again=0.0, input=max(layer.input, before.crossing))
        for before, layer in zip([Layer(), *counts], counts)
    ]
    return make_costs(tested, [layers], [rows], [CellCosts()])
