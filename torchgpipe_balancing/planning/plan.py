"""Plan a pipeline for a model: measure, search, explain."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, cast, overload

import numpy as np
import torch
from torch import nn

from torchgpipe.batch.given import MicroBatches
from torchgpipe.batch.microbatch import chunk_sizes
from torchgpipe.devices.device import canonical_device, kind_of, working_devices
from torchgpipe.devices.memory import read_size, shown_size
from torchgpipe.devices.torch_internals import BatchNormBase
from torchgpipe.devices.typing import Device
from torchgpipe.schedule import NAMES, ScheduleName
from torchgpipe.schedule.programs import RESIDENT, verified
from torchgpipe_balancing.measure import undisturbed
from torchgpipe_balancing.planning.candidates import (
    PlanInput,
    candidates,
    default_chunks,
    fitted,
    most_partitions,
    nearest,
    orders,
    rows_of,
)
from torchgpipe_balancing.planning.check import Check, try_out
from torchgpipe_balancing.planning.measure import measured
from torchgpipe_balancing.planning.model_under_test import ModelUnderTest, release_memory
from torchgpipe_balancing.planning.offload import MOST_PARTITIONS, OffloadPlan, plan_offload
from torchgpipe_balancing.planning.on_meta import as_on_accelerator
from torchgpipe_balancing.planning.optimizer import Optimizer, states_of
from torchgpipe_balancing.planning.problem import Device as PlannedDevice
from torchgpipe_balancing.planning.result import Plan
from torchgpipe_balancing.planning.text import describe

__all__ = ["Check", "DoesNotFit", "Plan", "plan"]

#: So many candidates are kept.
_MOST = 10


class DoesNotFit(ValueError):
    """Nothing that was tried fits the devices. The message says by how much, and what would fit."""


@overload
def plan(model: nn.Module, sample: Any, *, batch: int, offload: Literal[True], **arguments: Any) -> OffloadPlan: ...
@overload
def plan(model: nn.Module, sample: Any, *, batch: int, offload: Literal[False] = ..., **arguments: Any) -> Plan: ...


def plan(
    model: nn.Module,
    sample: Any,
    *,
    batch: int,
    memory: Sequence[float | str] | None = None,
    devices: Iterable[Device] | None = None,
    optimizer: Optimizer = None,
    target: Any = None,
    schedule: ScheduleName | Collection[ScheduleName] | None = None,
    chunks: int | Collection[int] | None = None,
    checkpoint: bool = True,
    margin: float = 0.1,
    speeds: Sequence[float] | None = None,
    bandwidth: float | None = None,
    seconds: float = 10.0,
    trials: int = 4,
    offload: bool = False,
    **options: Any,
) -> Plan | OffloadPlan:
    """Decide how to pipeline a model: balance, number of micro-batches, schedule, and which layers to recompute. ::

        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        plan = torchgpipe.plan(
            model, torch.randn(4, 64), batch=32,
            memory=[2**20, 2**20], devices=["cpu:0", "cpu:1"],
            optimizer=torch.optim.AdamW, seconds=1,
            loss_fn=lambda output, target: output.mean(),
        )
        print(plan)
        model = plan.apply(model)
        loss = model.step(torch.randn(32, 64))

    A copy of the model is measured: every layer, in a pipeline over the devices, with micro-batches of up to three
    sizes. For each schedule and number of micro-batches, the measured times are balanced within the memory, with layers
    recomputed where memory lacks. The plan is the candidate whose simulated step is the shortest; or, of several that
    are nearly as short, the one that is the quickest when they run.
    A model on the meta device is not run: its sizes follow from shapes, and operations stand for times.

    Args:
        model: the model; a :class:`~torch.nn.Sequential` becomes a :class:`~torchgpipe.GPipe`, any other is
            :func:`~torchgpipe.pipelined`. It is not changed
        sample: an input of some rows: for a Sequential as in :meth:`GPipe.step <torchgpipe.GPipe.step>`, for others
            as in :func:`~torchgpipe.pipelined`
        batch: the rows of a mini-batch
        memory: the bytes of each device's memory, as numbers or as texts such as ``'14GiB'`` (default: what the
            accelerators have; no limit on the CPU)
        devices: the devices (default: as many as ``memory`` has of the accelerators, or else of the CPU's cores); if
            their memories differ, the plan uses them in this order, from the largest memory to the smallest, or the
            other way round
        optimizer: what will train the model: a class such as ``torch.optim.AdamW``, a function that takes parameters,
            an optimizer, or the bytes that it keeps for each byte of a parameter (default: nothing)
        target: the target of the loss function, for the rows of the sample
        schedule: the schedules to try, or one (default: all; ``'1F1B'`` on the meta device, where no times tell
            whether others are faster)
        chunks: the numbers of micro-batches to try, or one (default: powers of two; with batch norms those that leave
            each micro-batch at least two rows)
        checkpoint: whether layers may be recomputed
        margin: the share of the memory that is left free, for fragmentation and for what operations need while they run
        speeds: how fast each device is, relative to the others (default: all are equally fast; devices of several
            kinds need it)
        bandwidth: bytes a second between two devices (default: measured)
        seconds: how long to measure; some seventy steps run in any case
        trials: how many of the best candidates to run for a few steps, so that the quickest is chosen; 0 for none
        offload: whether weights live in host memory: the plan then decides on partitions, micro-batches and
            recomputation under ``'LayerMajor'`` by their bytes; nothing is measured
        **options: further arguments of :class:`~torchgpipe.GPipe` or :func:`~torchgpipe.pipelined`, above all
            ``loss_fn``; the plan applies them, too

    Returns:
        the plan; an :class:`~torchgpipe_balancing.planning.offload.OffloadPlan` with ``offload``

    Raises:
        TypeError: ``model`` or ``optimizer`` is something else, or an option is unknown.
        ValueError: an argument does not fit, or the model cannot be pipelined.
        DoesNotFit: nothing fits the memory.
    """
    if isinstance(batch, MicroBatches) or isinstance(sample, MicroBatches):
        raise ValueError(
            "a plan is for mini-batches that are split; for MicroBatches, plan with a sample like one of them, batch= "
            "the rows of all, and chunks= their number"
        )
    if not isinstance(batch, (int, np.integer)) or batch < 1:
        raise ValueError(f"batch must be a positive whole number, the rows of a mini-batch, but got {batch!r}")
    batch = int(batch)
    if not 0 <= margin < 1:
        raise ValueError(f"margin must be a share of the memory from 0 to below 1, but got {margin!r}")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"bandwidth must be a positive number of bytes a second, but got {bandwidth!r}")
    if not seconds >= 0:
        raise ValueError(f"seconds must be 0 or more, but got {seconds!r}")
    decided = {"balance", "partitions"} & {*options}
    if decided:
        raise TypeError(f"a plan decides on {' and '.join(sorted(decided))}, which cannot be given")
    planned = _planned_devices(devices, memory, speeds, margin)
    places = [torch.device(device.name) for device in planned]
    slowness = [device.slowness for device in planned]
    on_meta = isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters())
    schedules = _schedules(schedule if schedule is not None else ("1F1B",) if on_meta else RESIDENT)
    counts = _chunks(chunks, batch, len(places), model)
    if offload:
        recompute = (True, False) if checkpoint else (False,)
        with undisturbed(places), as_on_accelerator() if on_meta else nullcontext():
            tested = ModelUnderTest(model, sample, target, MOST_PARTITIONS, options)
            best, least = plan_offload(tested, sample, batch, planned, counts, recompute, options)
        del tested
        release_memory(places)
        if best is None:
            more = f"{shown_size(least / (1 - margin))} on each device, or smaller micro-batches (chunks)"
            raise DoesNotFit(f"nothing fits {batch} rows with weights in host memory; it would fit with {more}")
        return best
    states = 1.0 + states_of(optimizer)
    most = most_partitions(schedules, len(places))
    sizes = sorted({rows_of(batch, count) for count in counts})
    sizes = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    with undisturbed(places) as outside, as_on_accelerator() if on_meta else nullcontext():
        tested = ModelUnderTest(model, sample, target, most, options)
        outside.note([tested.plain(tested.rows)], tested.parameters())
        if len(tested.layers) < len(places):
            raise ValueError(
                f"the model has {len(tested.layers)} layers that can be kept apart, fewer than the {len(places)} "
                "devices; give fewer devices"
            )
        costs = measured(tested, places, slowness, batch, sizes, seconds=seconds)
        if bandwidth is not None:
            costs = replace(costs, per_byte=1 / bandwidth)
        given = PlanInput(costs, planned, batch, states, schedules, counts, checkpoint)
        tried = [(one, candidates(one)) for one in orders(given)]
        given, found = min(tried, key=lambda pair: pair[1][0].seconds if pair[1] else math.inf)
        if not found:
            raise DoesNotFit(_misfit(given, margin))
        usual = next(iter(candidates(replace(given, schedules=("1F1B",)))), None)
        found = fitted(given, found) if costs.has_times else found
        fitting = try_out(tested, given, found[:_MOST], trials if costs.has_times else 0)
        if not fitting:
            raise DoesNotFit("memory ran out for all candidates that were predicted to fit; give a larger margin")
    del tested
    release_memory(places)  # The memory of the copy that was measured is for the model now.
    return Plan(given, tuple(fitting), sample, usual, target, options)


def _planned_devices(
    devices: Iterable[Device] | None,
    memory: Sequence[float | str] | None,
    speeds: Sequence[float] | None,
    margin: float,
) -> tuple[PlannedDevice, ...]:
    if isinstance(devices, (str, int, torch.device)):
        raise TypeError(f"devices must be a list of devices, but got {devices!r}")
    sizes = None if memory is None else _bytes_of_each(memory)
    if devices is not None:
        places = [canonical_device(device) for device in devices]
    else:
        places = working_devices()
        if sizes is not None and len(sizes) > len(places) and places[0].type == "cpu":
            places = [torch.device("cpu", k) for k in range(len(sizes))]
        places = places[: None if sizes is None else len(sizes)]
    n, names = len(places), [*map(str, places)]
    if not n or (sizes is not None and len(sizes) != n):
        raise ValueError(
            f"memory has {len(sizes or ())} numbers, one for each device, but there are {n} devices: {names}"
        )
    if len(set(places)) < n:
        raise ValueError(f"each device must be there once, but got {names}")
    if speeds is None:
        kinds = {kind_of(place): None for place in places}
        if len(kinds) > 1:
            raise ValueError(
                f"the devices are of several kinds, {', '.join(kinds)}: give speeds=, how fast each of {names} is, "
                "relative to the others, such as speeds=[2, 1]"
            )
        speeds = [1.0] * n
    if len(speeds) != n or not all(speed > 0 for speed in speeds):
        raise ValueError(f"speeds must have a positive number for each of {n} devices, but got {speeds!r}")
    if sizes is None:
        sizes = [
            math.inf if place.type == "cpu" else float(torch.accelerator.get_memory_info(place)[1]) for place in places
        ]
    if not all(size > 0 for size in sizes):
        raise ValueError(f"memory must have positive numbers of bytes, but got {sizes}")
    return tuple(
        PlannedDevice(name, size * (1 - margin), max(speeds) / speed) for name, size, speed in zip(names, sizes, speeds)
    )


def _bytes_of_each(memory: Any) -> list[float]:
    try:
        if not isinstance(memory, str):
            return [read_size(size) if isinstance(size, str) else float(size) for size in memory]
    except TypeError:
        pass
    raise TypeError(
        f"memory must be a list with the bytes of each device, such as ['14GiB', '14GiB'], but got {memory!r}"
    )


def _schedules(schedule: str | Collection[str]) -> tuple[ScheduleName, ...]:
    names: list[Any] = [schedule] if isinstance(schedule, str) else list(schedule)
    if not names:
        raise ValueError(f"schedule must name at least one of {', '.join(NAMES)}")
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"a plan tries schedules by name, of {', '.join(NAMES)}, but got {name!r}")
        verified(cast(Any, name))
    return tuple(names)


def _chunks(chunks: int | Collection[int] | None, batch: int, n: int, model: nn.Module) -> tuple[int, ...]:
    if chunks is None:
        counts = default_chunks(batch, n)
        if isinstance(model, nn.Module) and any(isinstance(module, BatchNormBase) for module in model.modules()):
            # A batch norm refuses a single row in training, unless the row has several values for a channel.
            counts = tuple([count for count in counts if min(chunk_sizes(batch, count)) > 1]) or counts[:1]
        return counts
    counts = tuple(sorted(set(chunks)) if isinstance(chunks, Collection) else [chunks])
    if not counts or not all(isinstance(count, int) and 1 <= count <= batch for count in counts):
        raise ValueError(f"chunks must be numbers from 1 to the {batch} rows of a mini-batch, but got {chunks!r}")
    return counts


def _misfit(given: PlanInput, margin: float) -> str:
    """Say by how much nothing fits."""
    near = nearest(given)
    if near is None:
        return f"no schedule of {list(given.schedules)} fits {len(given.devices)} devices and these layers"
    excess = [need - device.memory for need, device in zip(near.memory, given.devices)]
    lacking = [f"{shown_size(size)} on {device.name}" for size, device in zip(excess, given.devices) if size > 0]
    return (
        f"nothing fits {given.batch} rows; the nearest is {describe(given, near)}, "
        f"which lacks {', '.join(lacking)}\n"
        f"it would fit with {shown_size(max(excess) / (1 - margin))} more memory on each device"
    )
