"""Measure the layers of a model where they will run: in a pipeline over all devices, with each layer as a partition.

So times have in them what layers measured alone would not: cores and an interpreter that the devices share. Four steps
are recorded for each size of a micro-batch:

    each layer a partition    under '1F1B': F and B of each layer      under 'ZeroBubble': F, I and W
    a partition a device      the same: what a cell takes beside its layers

    cell  =  (sum over the layers, each a partition  -  sum over the devices)  /  (layers - devices)

The speed of a machine changes within seconds. So all pipelines take turns: what slows one of them down for a while
slows down the others as well.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.devices import links
from torchgpipe.devices.device import same_memory
from torchgpipe.devices.memory import bytes_of
from torchgpipe.model.attached import with_attached
from torchgpipe.schedule import ScheduleName, program, simulate
from torchgpipe.timeline.recorder import record
from torchgpipe_balancing.partition import partition
from torchgpipe_balancing.planning.costs import Costs, LayerCosts
from torchgpipe_balancing.planning.counting import count_bytes
from torchgpipe_balancing.planning.model_under_test import Config, ModelUnderTest
from torchgpipe_balancing.planning.on_meta import operations_counter
from torchgpipe_balancing.planning.problem import NAMES, CellCosts, Layer

__all__ = ["Recorded", "make_costs", "measured", "seconds_of_copies", "synchronize", "time_steps"]

_KINDS = {
    "forward": "F",
    "recomputation": "R",
    "backward": "B",
    "backward of the input": "I",
    "backward of the weights": "W",
}

#: What a layer takes, in seconds, by the names of `Layer`.
Times: TypeAlias = dict[str, float]

#: The fewest rounds, and the steps of a pipeline in each; another step runs before them.
_ROUNDS, _STEPS = 2, 2


def measured(
    tested: ModelUnderTest,
    devices: Sequence[torch.device],
    slowness: Sequence[float],
    batch: int,
    rows: Sequence[int],
    *,
    seconds: float,
) -> Costs:
    """Measure a model, and return what it costs.

    Args:
        tested: the model
        devices: the devices to measure on
        slowness: the time that each device takes, relative to the one that times are for
        batch: the rows of a mini-batch
        rows: the sizes of micro-batches, in increasing order. Sizes for which memory runs out are left out
        seconds: roughly how long to measure
    """
    owned = tested.owned()
    on_meta = any(tensor.is_meta for tensors in owned for tensor in tensors)
    if on_meta:
        sizes = [count_bytes(tested, partial(tested.plain, count)) for count in rows]
        counted = [_operations(tested, partial(tested.plain, count)) for count in rows]
        more = rows[-1] * (len(devices) - 1) / (16 * len(devices))
        times = [
            [_without_times(of, 1 + more / count, tensors) for of, tensors in zip(each, owned)]
            for count, each in zip(rows, counted)
        ]
        cells, transfers = [CellCosts()] * len(rows), (0.0, 0.0)
    else:
        bench = _Bench(tested, devices, batch)
        smallest = rows[0]
        while rows:
            try:
                sizes = bench.sizes(rows)
                times, cells = bench.times(rows, seconds, slowness)
                break
            except torch.OutOfMemoryError:  # What larger sizes take follows from the smaller ones.
                rows = rows[:-1]
        else:
            raise MemoryError(
                f"memory ran out on {[*map(str, devices)]} while micro-batches of {smallest} rows were measured; give "
                "a larger number of chunks, or plan on the meta device, which tells what fits"
            )
        apart = [pair for pair in pairwise(devices) if not same_memory(*pair)]
        # One bandwidth stands for all links, that of the slowest.
        transfers = max([seconds_of_copies(*pair) for pair in apart], key=itemgetter(1), default=(0.0, 0.0))
    samples = [
        [replace(size, **seconds_of) for seconds_of, size in zip(*of_rows)]
        for of_rows in zip(times, sizes, strict=True)
    ]
    where = "meta" if on_meta else ", ".join(map(str, devices))
    return make_costs(tested, samples, rows, cells, *transfers, where)


def make_costs(
    tested: ModelUnderTest,
    samples: Sequence[Sequence[Layer]],
    rows: Sequence[int],
    cells: Sequence[CellCosts],
    latency: float = 0.0,
    per_byte: float = 0.0,
    where: str = "",
) -> Costs:
    """Return what was measured of a model; see `Costs`.

    Args:
        tested: the model
        samples: for each of the ``rows``, what each layer took
    """
    layers = []
    for names, tensors, of_layer in zip(tested.layers, tested.owned(), zip(*samples), strict=True):
        owned = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        buffers = bytes_of(tensors) - bytes_of(owned)
        trained = bytes_of([tensor for tensor in tensors if tensor.requires_grad])
        layers.append(LayerCosts(tuple(names), bytes_of(with_attached(owned)), trained, buffers, of_layer))
    return Costs(tuple(layers), tuple(rows), tuple(cells), latency, per_byte, where, tested.loss)


def _operations(tested: ModelUnderTest, run: Callable[[], Any]) -> list[int]:
    """Return the floating point operations of each layer in a forward."""
    begun: dict[int, int] = {}
    with ExitStack() as stack:
        counter = stack.enter_context(operations_counter())

        def begin(k: int, *_: Any) -> None:
            begun.setdefault(k, counter.get_total_flops())

        for k, names in enumerate(tested.layers):
            for name in names:
                stack.callback(tested.module(name).register_forward_pre_hook(partial(begin, k)).remove)
        run()
        ends = [begun.get(k, counter.get_total_flops()) for k in range(1, len(tested.layers))]
        return [max(0, end - begun.get(k, end)) for k, end in enumerate([*ends, counter.get_total_flops()])]


def _without_times(operations: int, more: float, owned: Sequence[Tensor]) -> Times:
    """Return what stands for the times of a layer on the meta device: its operations. Frozen weights have no gradients.

    Each micro-batch counts as a few rows ``more`` than it has, or the smallest would always be the best. With so many
    more, about four micro-batches a device are the best of those that are tried by default.
    """
    seconds = max(1, operations) * more * 1e-12
    trained = bytes_of([tensor for tensor in owned if tensor.requires_grad]) / (bytes_of(owned) or 1)
    weights = seconds * min(1.0, trained)
    return {"forward": seconds, "backward": seconds + weights, "inputs": seconds, "weights": weights}


class _Bench:
    """Runs pipelines of a model over all devices: with each layer a partition, and with a partition a device.

    See `measured` for the arguments.
    """

    def __init__(self, tested: ModelUnderTest, devices: Sequence[torch.device], batch: int) -> None:
        self._tested, self._devices, self._batch = tested, devices, batch
        self._counts = partition([1 + bytes_of(tensors) for tensors in tested.owned()], len(devices))
        of_layers = [device for device, count in zip(devices, self._counts) for _ in range(count)]
        #: By whether each layer is a partition.
        self._configs = {True: Config([1] * len(of_layers), of_layers, 1), False: Config(self._counts, devices, 1)}

    def sizes(self, rows: Sequence[int]) -> list[list[Layer]]:
        """Return the bytes of each layer, for each size of a micro-batch."""
        sizes = []
        for count in rows:
            model, step = self._tested.pipeline(self._configs[True])
            try:
                step(count)  # Its first run allocates more.
                sizes.append(count_bytes(self._tested, partial(step, count)))
            finally:
                model.zero_grad()
        return sizes

    def times(self, rows: Sequence[int], seconds: float, slowness: Sequence[float]) -> Any:
        """Return for each size of a micro-batch the times of each layer; and those of cells."""
        schedules: list[ScheduleName] = ["1F1B", "ZeroBubble"] if len(self._devices) > 1 else ["1F1B"]
        runs = {key: Recorded() for key in product(rows, schedules, (True, False))}
        end = time.perf_counter() + seconds
        rounds = 0
        while rounds < _ROUNDS or time.perf_counter() < end:
            for (count, schedule, apart), recorded in runs.items():
                m = self._chunks(count)
                model, step = self._tested.pipeline(self._configs[apart]._replace(chunks=m, schedule=schedule))
                recorded.run(model, partial(step, count * m), self._devices)
            rounds += 1
        of_layers = [factor for factor, count in zip(slowness, self._counts) for _ in range(count)]
        return zip(*[self._times_of(count, runs, of_layers) for count in rows])

    def _times_of(
        self, rows: int, runs: Mapping[tuple[int, ScheduleName, bool], Recorded], slowness: Sequence[float]
    ) -> tuple[list[Times], CellCosts]:
        layers, partitions = range(len(slowness)), range(len(self._devices))
        apart, together = (runs[rows, "1F1B", is_apart] for is_apart in (True, False))
        seconds = {kind: [apart.median(kind, k) for k in layers] for kind in "FB"}
        cell = {kind: _beside(seconds[kind], [together.median(kind, j) for j in partitions]) for kind in "FB"}
        if len(partitions) == 1:
            seconds |= {kind: [backward / 2 for backward in seconds["B"]] for kind in "IW"}
            cell |= dict.fromkeys("IW", cell["B"] / 2)
        else:
            halves, halves_together = (runs[rows, "ZeroBubble", is_apart] for is_apart in (True, False))
            first = self._counts[0]  # The first partition has no first half of backward.
            for kind in "IW":
                seconds[kind] = [halves.median(kind, k) for k in layers]
                cell[kind] = _beside(seconds[kind][first:], [halves_together.median(kind, j) for j in partitions[1:]])
        times = [
            {name: max(0.0, seconds[kind][k] - cell[kind]) / factor for kind, name in NAMES.items()}
            for k, factor in enumerate(slowness)
        ]
        window = statistics.median(together.windows)
        actions = program("1F1B", self._chunks(rows), partitions)
        factor = window / simulate(actions, lambda action: together.median(action.kind, action.j)).seconds
        step = statistics.median(together.steps) - window
        return times, CellCosts(**{name: cell[kind] for kind, name in NAMES.items()}, step=step, factor=factor)

    def _chunks(self, rows: int) -> int:
        """Return with how many micro-batches to measure: enough for all devices, and no more than in a mini-batch."""
        n = len(self._devices)
        return max(2, n, min(2 * n, self._batch // rows))


class Recorded:
    """What the steps of a pipeline have shown.

    Attributes:
        steps: the seconds of each step
        windows: for each run, the seconds of a step from the start of its first cell to the end of its last
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.windows: list[float] = []
        self._seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    def run(self, pipeline: nn.Module, step: Callable[[], Any], devices: Sequence[torch.device]) -> None:
        """Run a step of a pipeline to warm up, and add the cells of a few more."""
        time_steps(step, devices, 1, pipeline)
        with record(pipeline, steps=_STEPS) as timeline:
            self.steps += time_steps(step, devices, _STEPS, pipeline)
        self.windows.append(timeline.report().duration / _STEPS)
        for span in timeline.spans:
            if span.computes:
                self._seconds[_KINDS[span.kind], span.partition].append(span.seconds)

    def median(self, kind: str, j: int) -> float:
        """Return the median of the seconds of an action in partition ``j``."""
        return statistics.median(self._seconds[kind, j] or [0.0])


def _beside(apart: Sequence[float], together: Sequence[float]) -> float:
    """Return what a cell takes beside its layers, given the times of layers by themselves and of partitions."""
    more_cells = len(apart) - len(together)
    return max(0.0, sum(apart) - sum(together)) / more_cells if more_cells else 0.0


def seconds_of_copies(source: torch.device, target: torch.device) -> tuple[float, float]:
    """Return the seconds that any copy from one device to another takes, and those for each byte besides."""
    small, large = 1 << 10, 1 << 24

    def seconds(size: int) -> float:
        original = torch.empty(size, dtype=torch.uint8, device=source)
        return statistics.median(time_steps(lambda: links.to(original, target, copy=True), (source, target), 10))

    latency = seconds(small)
    return latency, max(0.0, seconds(large) - latency) / (large - small)


def time_steps(
    run: Callable[[], Any], devices: Sequence[torch.device], steps: int, model: nn.Module | None = None
) -> list[float]:
    """Return the seconds of each of so many steps.

    Args:
        run: runs a step
        devices: the devices
        steps: the number of steps
        model: the pipeline that runs, if it is one; it keeps no gradients
    """
    seconds = []
    for _ in range(steps):
        synchronize(devices)
        begin = time.perf_counter()
        run()
        synchronize(devices)
        seconds.append(time.perf_counter() - begin)
        if model is not None:
            model.zero_grad()
    return seconds


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait for all work of the accelerators among the devices."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
