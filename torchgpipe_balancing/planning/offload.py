"""Plan a pipeline whose weights live in host memory: partitions, slots, micro-batches, and whether to recompute.

Other plans measure the model on the devices, which here it may not fit. So each layer is a partition of a pipeline with
offload, which is recorded. A plan for n devices is simulated under 'LayerMajor', with uploads, see
`torchgpipe.schedule.residency`. A device has to hold, for partitions of layers

    slots times the largest weights,  three times the largest gradients,  all buffers
    with recomputation: the largest kept of a layer, and four times the inputs of the layers of a partition
    without: all that its layers keep, for each micro-batch
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, cycle, pairwise, product, takewhile
from itertools import count as count_from
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices.memory import shown_size
from torchgpipe.devices.torch_internals import pytree
from torchgpipe.schedule import program
from torchgpipe.schedule.residency import Streamed, residency, streamed
from torchgpipe_balancing.partition import partition
from torchgpipe_balancing.planning.candidates import rows_of
from torchgpipe_balancing.planning.costs import Costs, in_proportion
from torchgpipe_balancing.planning.counting import count_bytes
from torchgpipe_balancing.planning.measure import Recorded, make_costs, measured_slowness, seconds_of_copies
from torchgpipe_balancing.planning.model_under_test import Config, ModelUnderTest, apply, prepare_model
from torchgpipe_balancing.planning.problem import CellCosts, Device, Layer, Problem

__all__ = ["OffloadPlan", "plan_offload"]

_SLOTS = (2, 3, 4)
_MOST_PARTITIONS = 1024

#: How often steps are measured, so that a single delay does not count, and the micro-batches of each.
_ROUNDS, _CHUNKS = 2, 2


@dataclass(frozen=True)
class OffloadPlan:
    """A plan for a pipeline whose weights live in host memory; print it, or apply it.

    Attributes:
        balance: the number of layers in each partition
        devices: the devices, which partitions use in turn
        chunks: the number of micro-batches
        slots: for each device, the partitions whose weights have room there at a time
        recomputes: whether all layers are recomputed
        seconds: the predicted time of a step
        memory: for each device, the bytes that it needs
        bytes_up: the bytes of weights that go to the devices in a step
        bytes_down: the bytes of gradients that come back
        hidden: the seconds of uploads that hide behind computing
        waited: the seconds of uploads that do not
        bandwidth: the bytes a second between host and device that were measured, or given
        rows_to_hide: the rows of a mini-batch from which on uploads hide behind forward, and behind backward
        layers: the names of the modules of each layer
    """

    balance: tuple[int, ...]
    devices: tuple[torch.device, ...]
    chunks: int
    slots: tuple[int, ...]
    recomputes: bool
    seconds: float
    memory: tuple[float, ...]
    bytes_up: int
    bytes_down: int
    hidden: float
    waited: float
    bandwidth: float
    rows_to_hide: tuple[float, ...]
    layers: tuple[tuple[str, ...], ...]
    _tokens: int = field(default=1, repr=False)
    _sample: Any = field(default=None, repr=False, compare=False)
    _options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def apply(self, model: nn.Module, **options: Any) -> Any:
        """Pipeline a model as planned; see `Plan.apply`."""
        n = len(self.balance)
        places = [self.devices[j % len(self.devices)] for j in range(n)]
        recomputed = range(len(self.layers)) if self.recomputes else ()
        way = Config(self.balance, places, self.chunks, "LayerMajor", recomputed)
        arguments = {**self._options, "offload": True, "slots": list(self.slots), **options}
        return apply(model, self.layers, way, self._sample, arguments)

    def __str__(self) -> str:
        unit, per = ("tokens", self._tokens) if self._tokens > 1 else ("rows", 1)
        forward, backward = (f"{rows * per:,.0f}" for rows in self.rows_to_hide)
        slots = " and ".join(map(str, self.slots if len({*self.slots}) > 1 else self.slots[:1]))
        held = ", ".join(f"{shown_size(size)} on {device}" for device, size in zip(self.devices, self.memory))
        return (
            f"{len(self.balance)} partitions, {slots} slots, chunks={self.chunks}, "
            f"{'with' if self.recomputes else 'without'} recomputation: {self.seconds:.3g} s a step\n"
            f"a step moves {shown_size(self.bytes_up)} up and {shown_size(self.bytes_down)} down, at "
            f"{shown_size(self.bandwidth)} a second\n"
            f"of the uploads {self.hidden:.3g} s hide behind computing, {self.waited:.3g} s do not\n"
            f"they hide behind forward from {forward} {unit} a step on, behind backward from {backward}\n"
            f"needs {held}"
        )


def plan_offload(
    model: nn.Module,
    sample: Any,
    target: Any,
    batch: int,
    planned: Sequence[Device],
    slowness: Sequence[float] | None,
    chunks: Sequence[int],
    recompute: Sequence[bool],
    bandwidth: float | None,
    options: Mapping[str, Any],
) -> tuple[OffloadPlan | None, float]:
    """Plan for weights in host memory; see :func:`torchgpipe.plan`.

    Returns:
        the quickest plan that fits, and the bytes of memory that the one with the least needs on a device
    """
    devices = [torch.device(device.name) for device in planned]
    tested = prepare_model(model, sample, target, _MOST_PARTITIONS, {**options, "offload": True, "slots": 1})
    sizes = sorted({rows_of(batch, count) for count in (max(chunks), min(chunks))})
    costs, slowness = _measured(tested, devices, sizes, slowness)
    planned = [replace(device, slowness=factor) for device, factor in zip(planned, slowness)]
    del tested
    if bandwidth is None:
        per_byte = [seconds_of_copies(torch.device("cpu"), device, pinned=True)[1] for device in devices]
        bandwidth = 1 / max(1e-15, *per_byte)
    ids = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.dim() == 2]
    tokens = next((tensor.shape[1] for tensor in ids if not tensor.is_floating_point()), 1)
    best, least, n = None, math.inf, len(devices)
    for partitions, count, recomputes in product(_numbers(n, len(costs.layers)), chunks, recompute):
        rows = rows_of(batch, count)
        division = _Division(costs, planned, rows, count, partitions, recomputes=recomputes)
        for most in _SLOTS[: max(1, partitions // n - 1)]:
            # A device with less memory than others has fewer slots.
            slots = [division.slots(k, most) for k in range(n)]
            held = [division.held(k, count) for k, count in enumerate(slots)]
            least = min(least, max(held))
            if any(size > device.memory for size, device in zip(held, planned)):
                continue
            ran = division.streamed(slots, bandwidth)
            # Fewer partitions, micro-batches and slots come first.
            if best is None or ran.seconds < 0.99 * best.seconds:
                stays, weights = residency(division.program, slots), division.weights
                computing = [sum([cost.seconds[kind] for cost in division.costs]) for kind in "FB"]
                best = OffloadPlan(
                    balance=tuple(division.balance),
                    devices=tuple(devices),
                    chunks=count,
                    slots=tuple(slots),
                    recomputes=recomputes,
                    seconds=ran.seconds,
                    memory=tuple(held),
                    bytes_up=stays.bytes_up(weights),
                    bytes_down=stays.bytes_down(division.trained),
                    hidden=ran.uploading - ran.waited,
                    waited=ran.waited,
                    bandwidth=bandwidth,
                    rows_to_hide=tuple(
                        [sum(weights) / bandwidth * rows * n / (passes or math.inf) for passes in computing]
                    ),
                    layers=tuple([layer.modules for layer in costs.layers]),
                    _tokens=tokens,
                    _sample=sample,
                    _options=options,
                )
    return best, least


def _numbers(n: int, layers: int) -> list[int]:
    """Return the numbers of partitions to try: some that devices share evenly, and one for each layer."""
    numbers = takewhile(lambda count: count < layers, (int(1.5**k) * n for k in count_from(0)))
    return sorted({*numbers, layers})


class _Division:
    """Layers divided into so many partitions, which devices use in turn, for micro-batches of so many rows."""

    def __init__(
        self, costs: Costs, devices: Sequence[Device], rows: int, m: int, partitions: int, *, recomputes: bool
    ) -> None:
        self._n, self._m, self._recomputes, self._devices = len(devices), m, recomputes, devices
        places = tuple([j % self._n for j in range(partitions)])
        speeds = [1 / devices[k].slowness for k in places]
        self.balance = partition([1 + layer.parameters for layer in costs.layers], speeds=speeds)
        spans = list(pairwise(accumulate(self.balance, initial=0)))
        #: The bytes of the parameters of each partition, all and those that require grad.
        self.weights = [sum([layer.parameters for layer in costs.layers[a:b]]) for a, b in spans]
        self.trained = [sum([layer.trained for layer in costs.layers[a:b]]) for a, b in spans]
        self.program = program("LayerMajor", m, places)
        problem = Problem(costs.layers_at(rows, m, states=0.0), tuple(devices), places, self.program)
        recomputed = range(len(costs.layers) if recomputes else 0)
        self.costs = [problem.partition_cost(j, *span, recomputed) for j, span in enumerate(spans)]

    def streamed(self, slots: Sequence[int], bandwidth: float) -> Streamed:
        """Return the simulated step with so many slots on each device, given the bytes a second of uploads."""
        return streamed(
            self.program,
            slots,
            lambda action: self.costs[action.j].seconds[action.kind],
            lambda j: self.weights[j] / bandwidth,
        )

    def slots(self, k: int, most: int) -> int:
        """Return the slots that device ``k`` has room for, from two to so many; two if there is no room."""
        fitting = (slots for slots in range(most, _SLOTS[0], -1) if self.held(k, slots) <= self._devices[k].memory)
        return next(fitting, _SLOTS[0])

    def held(self, k: int, slots: int) -> float:
        """Return the bytes that device ``k`` holds."""
        placed = slice(k, None, self._n)
        costs, in_host_memory = self.costs[placed], sorted(self.weights[placed], reverse=True)[slots:]
        state = sum([cost.state for cost in costs]) - sum(in_host_memory) + 3 * max(self.trained[placed], default=0)
        kept = [cost.kept for cost in costs]
        if not self._recomputes:
            return state + self._m * sum(kept)
        return state + max([cost.room for cost in costs], default=0.0) + 4 * max(kept, default=0.0)


def _measured(
    tested: ModelUnderTest, devices: Sequence[torch.device], sizes: Sequence[int], slowness: Sequence[float] | None
) -> tuple[Costs, Sequence[float]]:
    """Measure each layer as a partition of a pipeline with weights in host memory, in micro-batches of these sizes.

    Return what it costs, and the slowness of the devices, which is measured if it is None.
    """
    if any(tensor.is_meta for tensors in tested.owned() for tensor in tensors):
        raise ValueError("a plan with offload=True measures, so the model needs weights; load it on the CPU")
    # No partition has memory from another one: what it keeps again is its own, and so is its input.
    counts = count_bytes(tested, partial(tested.plain, sizes[0]))
    held = [
        replace(layer, kept=layer.kept + layer.again, again=0.0, input=max(layer.input, before.crossing))
        for before, layer in zip([Layer(), *counts], counts)
    ]
    layers = range(len(held))
    places = [devices[j % len(devices)] for j in layers]
    config = Config([1] * len(held), places, _CHUNKS, "LayerMajor", layers)
    slowness = slowness or measured_slowness(tested, config, sizes[-1])
    pipeline, step = tested.pipeline(config)
    samples = []
    for rows in sizes:
        recorded = Recorded()
        for _ in range(_ROUNDS):
            recorded.run(pipeline, partial(step, rows * _CHUNKS), devices)
        sized = [Layer(**in_proportion(layer, rows, sizes[0])) for layer in held]
        samples.append(
            [
                replace(
                    layer,
                    forward=recorded.mean("F", k) / factor,
                    backward=recorded.mean("B", k) / factor,
                    first=recorded.first(k) / factor,
                )
                for k, (layer, factor) in enumerate(zip(sized, cycle(slowness)))
            ]
        )
    return make_costs(tested, samples, sizes, [CellCosts()] * len(sizes)), slowness
