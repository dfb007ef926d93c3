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
from itertools import accumulate, pairwise, product, takewhile
from itertools import count as count_from
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices.memory import shown_size
from torchgpipe.devices.torch_internals import pytree
from torchgpipe.schedule import Action, program
from torchgpipe.schedule.residency import residency, streamed
from torchgpipe.timeline.recorder import record
from torchgpipe_balancing.partition import partition
from torchgpipe_balancing.planning.alternatives import rows_of
from torchgpipe_balancing.planning.costs import Costs, in_proportion
from torchgpipe_balancing.planning.counting import counted
from torchgpipe_balancing.planning.measure import costs_of, seconds_of_copies
from torchgpipe_balancing.planning.problem import CellCosts, Device, Layer, PartitionCost, Problem
from torchgpipe_balancing.planning.subject import Subject, Way, apply, subject_of

__all__ = ["OffloadPlan", "planned_offload"]

_SLOTS = (2, 3, 4)
_MOST_PARTITIONS = 1024

#: What is measured: the steps, and the micro-batches of each.
_STEPS, _CHUNKS = 2, 2


@dataclass(frozen=True)
class OffloadPlan:
    """A plan for a pipeline whose weights live in host memory; print it, or apply it.

    Attributes:
        balance: the number of layers in each partition
        devices: the devices, which partitions use in turn
        chunks: the number of micro-batches
        slots: the partitions whose weights have room on a device at a time
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
    slots: int
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
        way = Way(self.balance, places, self.chunks, "LayerMajor", recomputed)
        more = {**self._options, "offload": True, "slots": self.slots, **options}
        return apply(model, [list(names) for names in self.layers], way, self._sample, more)

    def __str__(self) -> str:
        unit, per = ("tokens", self._tokens) if self._tokens > 1 else ("rows", 1)
        forward, backward = (f"{rows * per:,.0f}" for rows in self.rows_to_hide)
        held = ", ".join(f"{shown_size(size)} on {one}" for one, size in zip(self.devices, self.memory))
        return (
            f"{len(self.balance)} partitions, {self.slots} slots, chunks={self.chunks}, "
            f"{'with' if self.recomputes else 'without'} recomputation: {self.seconds:.3g} s a step\n"
            f"a step moves {shown_size(self.bytes_up)} up and {shown_size(self.bytes_down)} down, at "
            f"{shown_size(self.bandwidth)} a second\n"
            f"of the uploads {self.hidden:.3g} s hide behind computing, {self.waited:.3g} s do not\n"
            f"they hide behind forward from {forward} {unit} a step on, behind backward from {backward}\n"
            f"needs {held}"
        )


def planned_offload(
    model: nn.Module,
    sample: Any,
    target: Any,
    batch: int,
    planned: Sequence[Device],
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
    subject = subject_of(model, sample, target, _MOST_PARTITIONS, {**options, "offload": True, "slots": 1})
    costs = _measured(subject, devices, sorted({rows_of(batch, count) for count in (max(chunks), min(chunks))}))
    del subject
    _, per_byte = (0.0, 1 / bandwidth) if bandwidth else seconds_of_copies(torch.device("cpu"), devices[0], pinned=True)
    speed = bandwidth or 1 / max(1e-15, per_byte)
    ids = [one for one in pytree.tree_leaves(sample) if isinstance(one, Tensor) and one.dim() == 2]
    tokens = next((one.shape[1] for one in ids if not one.is_floating_point()), 1)
    places = tuple([replace(device, slowness=1.0) for device in planned])  # Each layer was measured on its own.
    best, least, n, size = None, math.inf, len(devices), len(costs.layers)
    for partitions, count, recomputes in product(_numbers(n, size), chunks, recompute):
        balance = partition([1 + layer.parameters for layer in costs.layers], partitions)
        spans = list(pairwise(accumulate(balance, initial=0)))
        weights, trained = (
            [sum([getattr(one, name) for one in costs.layers[a:b]]) for a, b in spans]
            for name in ("parameters", "trained")
        )
        rows, turns = rows_of(batch, count), [j % n for j in range(partitions)]
        layers, actions = costs.layers_at(rows, count, states=0.0), program("LayerMajor", count, turns)
        problem, again = Problem(layers, places, tuple(turns), actions), range(size if recomputes else 0)
        took = [problem.partition_cost(j, *span, again) for j, span in enumerate(spans)]
        for slots in _SLOTS[: max(1, partitions // n - 1)]:
            held = [
                _held(took[k::n], weights[k::n], trained[k::n], count, slots, recomputes=recomputes) for k in range(n)
            ]
            least = min(least, max(held))
            if any(one > device.memory for one, device in zip(held, planned)):
                continue
            ran = streamed(actions, slots, partial(_cost, took), partial(_upload, weights, speed))
            # Fewer partitions, micro-batches and slots come first.
            if best is None or ran.seconds < 0.99 * best.seconds:
                stays = residency(actions, slots)
                whole = [sum([one.seconds[kind] for one in took]) for kind in "FB"]
                best = OffloadPlan(
                    tuple(balance),
                    tuple(devices),
                    count,
                    slots,
                    recomputes,
                    ran.seconds,
                    tuple(held),
                    stays.bytes_up(weights),
                    stays.bytes_down(trained),
                    ran.uploading - ran.waited,
                    ran.waited,
                    speed,
                    tuple([sum(weights) / speed * rows * n / (own or math.inf) for own in whole]),
                    tuple([layer.modules for layer in costs.layers]),
                    tokens,
                    sample,
                    options,
                )
    return best, least


def _numbers(n: int, layers: int) -> list[int]:
    """Return the numbers of partitions to try: some that devices share evenly, and one for each layer."""
    numbers = takewhile(lambda count: count < layers, (int(1.5**k) * n for k in count_from(0)))
    return sorted({*numbers, layers})


def _cost(took: Sequence[PartitionCost], action: Action) -> float:
    return took[action.j].seconds[action.kind]


def _upload(weights: Sequence[int], speed: float, j: int) -> float:
    return weights[j] / speed


def _held(
    own: Sequence[PartitionCost],
    weights: Sequence[int],
    trained: Sequence[int],
    m: int,
    slots: int,
    *,
    recomputes: bool,
) -> float:
    """Return the bytes of a device with these partitions."""
    in_host_memory = sorted(weights, reverse=True)[slots:]
    state = sum([one.state for one in own]) - sum(in_host_memory) + 3 * max(trained, default=0)
    kept = [one.kept for one in own]
    if not recomputes:
        return state + m * sum(kept)
    return state + max([one.room for one in own], default=0.0) + 4 * max(kept, default=0.0)


def _measured(subject: Subject, devices: Sequence[torch.device], sizes: Sequence[int]) -> Costs:
    """Measure each layer as a partition of a pipeline with weights in host memory, in micro-batches of these sizes."""
    if any(tensor.is_meta for own in subject.owned() for tensor in own):
        raise ValueError("a plan with offload=True measures, so the model needs weights; load it on the CPU")
    # No partition has memory from another one: what it keeps again is its own, and so is its input.
    counts = counted(subject, partial(subject.plain, sizes[0]))
    held = [
        replace(one, kept=one.kept + one.again, again=0.0, input=max(one.input, before.crossing))
        for before, one in zip([Layer(), *counts], counts)
    ]
    layers = range(len(held))
    places = [devices[j % len(devices)] for j in layers]
    pipeline, step = subject.pipeline(Way([1] * len(held), places, _CHUNKS, "LayerMajor", layers))
    samples = []
    for rows in sizes:
        step(_CHUNKS * rows)
        with record(pipeline, steps=_STEPS) as timeline:
            for _ in range(_STEPS):
                step(_CHUNKS * rows)
        forward, backward = [0.0 for _ in layers], [0.0 for _ in layers]
        for span in timeline.spans:
            if span.computes:
                took = forward if span.kind == "forward" else backward  # With the recomputation.
                took[span.partition] += span.seconds / (_STEPS * _CHUNKS)
        samples.append(
            [
                replace(Layer(**in_proportion(one, rows, sizes[0])), forward=a, backward=max(0.0, b - a))
                for one, a, b in zip(held, forward, backward)
            ]
        )
    return costs_of(subject, samples, sizes, [CellCosts()] * len(sizes))
