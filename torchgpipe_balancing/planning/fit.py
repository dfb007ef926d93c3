"""Tell what of a model fits devices, and how busy it keeps them, without a device and without weights.

The model is on the meta device. Bytes are counted as plans count them, and the floating point operations of layers
stand for their times. Each *way* to train takes micro-batches of the same size: one card and ``device_map`` accumulate
gradients over them, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import nn

from torchgpipe.devices.memory import bytes_of, shown_size
from torchgpipe.schedule import Action, Program, program, simulate
from torchgpipe.schedule.programs import RESIDENT, usual_places
from torchgpipe_balancing.planning.candidates import PlanInput, find_outcome, most_partitions, problem_for
from torchgpipe_balancing.planning.costs import Costs
from torchgpipe_balancing.planning.measure import measured
from torchgpipe_balancing.planning.model_under_test import ModelUnderTest
from torchgpipe_balancing.planning.offload import MOST_PARTITIONS, OffloadPlan, plan_offload
from torchgpipe_balancing.planning.on_meta import either_way, operations_counter
from torchgpipe_balancing.planning.optimizer import Optimizer, states_of
from torchgpipe_balancing.planning.problem import Choice, Device, Outcome, Problem
from torchgpipe_balancing.table import table

__all__ = ["Fit", "Way", "fit"]


class Way(NamedTuple):
    """A way to train.

    Attributes:
        name: its name
        fits: whether each device has room for it
        idle: the share of the devices' time in which they idle, without what copies take
        speed: how many times as fast as one card it is, without what copies take; 0 where these decide
        devices: the bytes that each device holds at its peak
        write: the lines that train so
    """

    name: str
    fits: bool
    idle: float
    speed: float
    devices: tuple[int, ...]
    write: str


@dataclass(frozen=True)
class Fit:
    """What a model takes, and the ways to train it.

    Attributes:
        parameters: the number of parameters
        weights: their bytes
        gradients: the bytes of their gradients
        optimizer: the bytes of the optimizer's states
        rows: the rows of a micro-batch
        chunks: the micro-batches of a mini-batch
        activations: the bytes that a micro-batch of the plain model keeps for its backward
        operations: the floating point operations of forward of a micro-batch
        guessed: whether the model reads numbers from tensors, which were taken for 1
        ways: the ways to train
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    rows: int
    chunks: int
    activations: int
    operations: int
    guessed: bool
    ways: tuple[Way, ...]

    def __str__(self) -> str:
        sizes = [shown_size(size) for size in (self.weights, self.gradients, self.optimizer, self.activations)]
        rows = [("way to train", "fits", "idle", "speed", "each device holds at most")]
        for way in self.ways:
            fits, speed = "yes" if way.fits else "no", f"{way.speed:.2f}x" if way.speed else "-"
            rows.append((way.name, fits, f"{way.idle:.0%}", speed, ", ".join(map(shown_size, way.devices))))
        best = max([way for way in self.ways if way.fits], key=lambda way: way.speed, default=None)
        guess = "the model reads numbers from tensors, which were taken for 1: what follows from them is off"
        written = ["nothing fits: give more or larger devices, or train fewer weights, as by --lora"]
        if best is not None:
            written = [f"the fastest that fits is {best.name}:", *["    " + line for line in best.write.splitlines()]]
        return "\n".join(
            [
                f"{self.parameters:,} parameters: weights {sizes[0]}, gradients {sizes[1]}, optimizer {sizes[2]}",
                f"{self.chunks} micro-batches of {self.rows}: each keeps {sizes[3]}, and takes {self.operations:.3g} "
                "operations forward",
                "what fits leaves a tenth of a device free; idle and speed follow from operations, without copies",
                *[guess] * self.guessed,
                *["", *table(rows, words=(0, 1, 4)), "", *written],
            ]
        )


def fit(
    model: nn.Module,
    sample: Any,
    memory: Sequence[float],
    *,
    batch: int | None = None,
    optimizer: Optimizer = torch.optim.AdamW,
    target: Any = None,
    tell: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Fit:
    """Count what a model takes, on the meta device.

    Args:
        model: a model on the meta device
        sample: a micro-batch, as for :func:`torchgpipe.plan`
        memory: the bytes of each device, of which a tenth is left free
        batch: the rows of a mini-batch (default: four micro-batches for each device)
        optimizer: as for :func:`torchgpipe.plan`
        target: of the sample, for a ``loss_fn``
        tell: is called with the name of what is counted next
        options: further arguments of the pipeline, such as ``loss_fn``
    """
    devices = tuple([Device(f"cuda:{k}", size * 0.9) for k, size in enumerate(memory)])
    states = states_of(optimizer)

    def count() -> tuple[ModelUnderTest, Costs, int, int, tuple[OffloadPlan | None, float]]:
        tell("the model")
        tested = ModelUnderTest(model, sample, target, most_partitions(RESIDENT, len(devices)), options)
        rows = min(batch or tested.rows, tested.rows)
        whole = batch or 4 * len(devices) * rows
        costs = measured(tested, [torch.device("meta")], [1.0], whole, [rows], seconds=0)
        with operations_counter() as counter:
            tested.plain(rows)
        tell("weights in host memory")
        finest = tested.with_layers_for(MOST_PARTITIONS)
        offloaded = plan_offload(finest, sample, whole, devices, (ceil(whole / rows),), (True, False), options)
        return tested, costs, whole, counter.get_total_flops(), offloaded

    (tested, costs, whole, operations, offloaded), guessed = either_way(count)
    rows = costs.rows[0]
    chunks = ceil(whole / rows)
    given = PlanInput(costs, devices, whole, 1.0 + states)
    writes = partial(_lines, isinstance(model, nn.Sequential), "loss_fn" in options)
    owned = tested.parameters()
    trained = bytes_of([parameter for parameter in owned if parameter.requires_grad])
    return Fit(
        # A byte has two weights of four bits.
        parameters=sum([parameter.numel() * (2 if parameter.dtype is torch.uint8 else 1) for parameter in owned]),
        weights=bytes_of(owned),
        gradients=trained,
        optimizer=round(trained * states),
        rows=rows,
        chunks=chunks,
        activations=round(sum([layer.kept for layer in costs.layers_at(rows, 0.0)])),
        operations=operations,
        guessed=guessed,
        ways=(*_ways(given, chunks, writes), _offloaded(given, chunks, *offloaded, writes)),
    )


def _ways(given: PlanInput, chunks: int, writes: Callable[..., str]) -> Iterator[Way]:
    """Yield the ways whose weights stay on their devices; a forward that is run again counts as time."""
    n, alone = len(given.devices), problem_for(replace(given, devices=given.devices[:1]), "1F1B", chunks, [0])
    ways = [("one card", alone)]
    if 1 < n <= len(given.costs.layers):
        placed = problem_for(given, "1F1B", chunks, range(n))
        ways.append(("device_map", replace(placed, program=_one_by_one(placed.m, n))))
        for schedule in RESIDENT:
            places = usual_places(schedule, n)
            if len(places) <= len(given.costs.layers):
                ways.append((schedule, problem_for(given, schedule, chunks, places)))
    write = partial(writes, [layer.modules for layer in given.costs.layers])
    seconds = alone.outcome(Choice((len(given.costs.layers),))).seconds
    for name, problem in ways:
        outcome = find_outcome(replace(problem, recomputes=False))
        yield _way(name, problem, outcome, seconds, write)
        if problem.schedule in ("GPipe", "1F1B"):  # The order of loss.backward(), and that of a step.
            recomputed = frozenset(range(len(problem.layers) - 1))
            outcome = problem.outcome(Choice(outcome.choice.balance, recomputed))
            yield _way(f"{name}, recomputed", problem, outcome, seconds, write)


def _one_by_one(m: int, n: int) -> Program:
    """Return the program in which one device works at a time, as ``device_map`` lets them."""
    return [[Action(kind, i, j) for i in range(m) for kind in ("F", "B")] for j in range(n)]


def _way(name: str, problem: Problem, outcome: Outcome, alone: float, write: Callable[..., str]) -> Way:
    devices = [problem.devices[place].name for place in problem.places]
    return Way(
        name=name,
        fits=problem.excess(outcome) <= 0,
        idle=outcome.simulation.bubble,
        speed=alone / outcome.seconds,
        devices=tuple([ceil(size) for size in outcome.memory]),
        write=write(name.partition(",")[0], problem.chunks, outcome.choice, devices),
    )


def _offloaded(given: PlanInput, chunks: int, best: OffloadPlan | None, least: float, writes: Any) -> Way:
    """Return the way whose weights live in host memory."""
    if best is None:
        return Way("offload", False, 0.0, 0.0, (ceil(least),) * len(given.devices), "")
    places = [j % len(given.devices) for j in range(len(best.balance))]
    idle = simulate(program("LayerMajor", chunks, places)).bubble  # As if partitions took equally long.
    choice = Choice(best.balance, frozenset(range(len(best.layers) - 1 if best.recomputes else 0)))
    written = writes(best.layers, "offload", chunks, choice, [str(best.devices[place]) for place in places])
    return Way("offload", True, idle, 0.0, tuple([ceil(size) for size in best.memory]), written)


def _lines(
    is_sequential: bool, has_loss_fn: bool, layers: Any, how: str, chunks: int, choice: Choice, devices: Sequence[str]
) -> str:
    """Return the lines that train in a way."""
    recomputed = [name for k in sorted(choice.recomputed) for name in layers[k]]
    if how in ("one card", "device_map"):
        placed = 'device_map="auto"' if how == "device_map" else "one device"
        again = ", gradient checkpointing" if recomputed else ""
        return f"# {placed}{again}, and gradient accumulation over {chunks} micro-batches"
    arguments = f"chunks={chunks}, devices={[*devices]}, checkpoint={recomputed or 'never'!r}, "
    arguments += "offload=True" if how == "offload" else f"schedule={how!r}"
    balance = {layers[cut][0]: j for j, cut in enumerate(list(accumulate(choice.balance))[:-1], 1)}
    made = f"GPipe(model, {[*choice.balance]}" if is_sequential else f"pipelined(model, sample, balance={balance}"
    if is_sequential or has_loss_fn:
        return f"model = torchgpipe.{made}, {arguments}, loss_fn=loss_fn)\nloss = model.step(input, target=target)"
    return f"model = torchgpipe.{made}, {arguments})\nloss = model.step(**batch)"
