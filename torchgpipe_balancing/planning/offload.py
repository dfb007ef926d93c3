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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from torchgpipe_balancing.planning.counting import counted
from torchgpipe_balancing.planning.measure import bytes_owned
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


@dataclass(frozen=True)
class _Layer:
    """A layer. Seconds are of a micro-batch: some for each row, and some besides; backward has the recomputation.

    Attributes:
        kept, input: the bytes that it keeps for each row for backward, and those of its input
    """

    forward: tuple[float, float]
    backward: tuple[float, float]
    weights: int
    trained: int
    buffers: int
    kept: float
    input: float

    def seconds(self, rows: float, *, recomputes: bool) -> dict[str, float]:
        """Return the seconds of F and B."""
        forward, backward = (max(0.0, a * rows + b) for a, b in (self.forward, self.backward))
        return {"F": forward, "B": backward if recomputes else max(0.0, backward - forward)}


def planned_offload(
    model: nn.Module,
    sample: Any,
    *,
    batch: int,
    devices: Sequence[torch.device],
    memory: Sequence[float],
    target: Any,
    chunks: Sequence[int],
    recompute: Sequence[bool],
    bandwidth: float | None,
    options: Mapping[str, Any],
) -> tuple[OffloadPlan | None, float]:
    """Plan for weights in host memory; see :func:`torchgpipe.plan`.

    Returns:
        the quickest plan that fits, and the bytes of memory that the one with the least needs on a device
    """
    subject = subject_of(model, sample, target, _MOST_PARTITIONS, {**options, "offload": True, "slots": 1})
    sizes = sorted({math.ceil(batch / count) for count in (max(chunks), min(chunks))})
    layers, speed, n = _measured(subject, devices, sizes), bandwidth or _bandwidth(devices[0]), len(devices)
    names = tuple(map(tuple, subject.layers))
    ids = [one for one in pytree.tree_leaves(sample) if isinstance(one, Tensor) and one.dim() == 2]
    tokens = next((one.shape[1] for one in ids if not one.is_floating_point()), 1)
    del subject
    best, least = None, math.inf
    for partitions, count, again in product(_numbers(n, len(layers)), chunks, recompute):
        balance = partition([1 + layer.weights for layer in layers], partitions)
        parts = [layers[a:b] for a, b in pairwise([0, *accumulate(balance)])]
        weights = [sum([one.weights for one in own]) for own in parts]
        actions, rows = program("LayerMajor", count, [j % n for j in range(partitions)]), math.ceil(batch / count)
        costs = [_sums([one.seconds(rows, recomputes=again) for one in own]) for own in parts]
        for slots in _SLOTS[: max(1, partitions // n - 1)]:
            held = [_held(parts[k::n], rows, count, slots, recomputes=again) for k in range(n)]
            least = min(least, max(held))
            if any(one > limit for one, limit in zip(held, memory)):
                continue
            ran = streamed(actions, slots, partial(_cost, costs), partial(_upload, weights, speed))
            # Fewer partitions, micro-batches and slots come first.
            if best is None or ran.seconds < 0.99 * best.seconds:
                stays, whole = residency(actions, slots), _sums([one.seconds(rows, recomputes=again) for one in layers])
                best = OffloadPlan(
                    tuple(balance),
                    tuple(devices),
                    count,
                    slots,
                    again,
                    ran.seconds,
                    tuple(held),
                    stays.bytes_up(weights),
                    stays.bytes_down([sum([one.trained for one in own]) for own in parts]),
                    ran.uploading - ran.waited,
                    ran.waited,
                    speed,
                    tuple([sum(weights) / speed * rows * n / (whole[kind] or math.inf) for kind in "FB"]),
                    names,
                    tokens,
                    sample,
                    options,
                )
    return best, least


def _numbers(n: int, layers: int) -> list[int]:
    """Return the numbers of partitions to try: some that devices share evenly, and one for each layer."""
    numbers = takewhile(lambda count: count < layers, (int(1.5**k) * n for k in count_from(0)))
    return sorted({*numbers, layers})


def _sums(of_layers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {kind: sum([one[kind] for one in of_layers]) for kind in "FB"}


def _cost(costs: Sequence[Mapping[str, float]], action: Action) -> float:
    return costs[action.j][action.kind]


def _upload(weights: Sequence[int], speed: float, j: int) -> float:
    return weights[j] / speed


def _held(parts: Sequence[Sequence[_Layer]], rows: int, m: int, slots: int, *, recomputes: bool) -> float:
    """Return the bytes of a device with these partitions."""
    layers = [one for own in parts for one in own]
    largest = sorted([sum([one.weights for one in own]) for own in parts], reverse=True)[:slots]
    trained = max([sum([one.trained for one in own]) for own in parts], default=0)
    state = sum(largest) + 3 * trained + sum([one.buffers for one in layers])
    if not recomputes:
        return state + rows * m * sum([one.kept for one in layers])
    inputs = max([sum([one.input for one in own]) for own in parts], default=0.0)
    return state + rows * (max([one.kept for one in layers], default=0.0) + 4 * inputs)


def _measured(subject: Subject, devices: Sequence[torch.device], sizes: Sequence[int]) -> list[_Layer]:
    """Measure each layer as a partition of a pipeline with weights in host memory, in micro-batches of these sizes."""
    owned, rows = subject.owned(), sizes[0]
    if any(tensor.is_meta for own in owned for tensor in own):
        raise ValueError("a plan with offload=True measures, so the model needs weights; load it on the CPU")
    count = len(owned)
    held = counted(subject, partial(subject.plain, rows))
    places = [devices[j % len(devices)] for j in range(count)]
    pipeline, step = subject.pipeline(Way([1] * count, places, _CHUNKS, "LayerMajor", range(count)))
    seen: list[list[list[float]]] = []
    for size in sizes:
        step(_CHUNKS * size)
        with record(pipeline, steps=_STEPS) as timeline:
            for _ in range(_STEPS):
                step(_CHUNKS * size)
        took = [[0.0, 0.0] for _ in owned]
        for span in timeline.spans:
            if span.computes:
                took[span.partition][span.kind != "forward"] += span.seconds / (_STEPS * _CHUNKS)
        seen.append(took)
    return [
        _Layer(
            _line(sizes, [of_size[j][0] for of_size in seen]),
            _line(sizes, [of_size[j][1] for of_size in seen]),
            *bytes_owned(own),
            kept=(held[j].kept + held[j].again) / rows,
            input=max(held[j].input, held[j - 1].crossing if j else 0) / rows,
        )
        for j, own in enumerate(owned)
    ]


def _line(sizes: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return the slope and the beginning of the line through the first and the last value."""
    if len(sizes) == 1:
        return values[0] / sizes[0], 0.0
    slope = max(0.0, values[-1] - values[0]) / (sizes[-1] - sizes[0])
    return slope, values[0] - slope * sizes[0]


def _bandwidth(device: torch.device) -> float:
    """Return the bytes a second from pinned memory of the host to a device, the best of some copies."""
    pinned = device.type != "cpu"
    host, found = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=pinned), []
    there = torch.empty_like(host, device=device, pin_memory=False)
    for _ in range(4):
        begin = time.perf_counter()
        there.copy_(host)
        found.append(time.perf_counter() - begin)
    return host.nbytes / min(found)
