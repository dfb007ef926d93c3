"""What a plan decides on, and what a decision costs: layers, devices, a program, and the arithmetic between them.

A *choice* is the number of layers in each partition, and the layers that are recomputed. A partition with the layers
from a to b takes, for each micro-batch, times the slowness of its device:

    F   cell + sum of forward                             + a cell for each recomputed layer
    B   cell + sum of backward                            + a cell, and forward, for each recomputed layer
    I   cell + sum of inputs                              programs that split backward recompute nothing,
    W   cell + sum of weights                             because a recomputed layer is differentiated as a whole

and of its device's memory, beside the state of its layers:

    from F to B or W    again(a) + sum of kept, or of input where a layer is recomputed
    from I to W         sum of waiting
    now and then        the largest kept among the layers that are recomputed, because they come back one by one

The input of the model needs no gradient, so the first partition has nothing to do in I and does all in W.

All of it is plain data: no tensor, no device of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from torchgpipe.schedule import Program, ScheduleName, Simulation, fastest, simulate
from torchgpipe.schedule.bound import least_time
from torchgpipe.schedule.simulation import Terms
from torchgpipe.schedule.work import work_of

__all__ = ["NAMES", "CellCosts", "Choice", "Device", "FittedSchedule", "Layer", "Outcome", "PartitionCost", "Problem"]


#: The kinds of actions, and what their seconds are called.
NAMES = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}


@dataclass(frozen=True)
class Layer:
    """What a layer takes of one micro-batch: seconds and bytes. Where some are not known, or do not matter, they are 0.

    Attributes:
        forward: seconds of forward
        backward: seconds of backward, in one piece
        inputs: seconds of the first half of a split backward
        weights: seconds of the second half
        kept: bytes that it keeps for backward, and that no layer before it keeps
        again: bytes that layers before it keep for backward, and layers from it on keep as well; a partition that
            begins with it holds a copy of them
        input: bytes that it keeps where it is recomputed: its input, unless the layer before keeps that
        waiting: bytes of the gradients that wait for the second half of backward
        crossing: bytes that go to the next layer if that is on another device
        state: bytes that it holds all the time: parameters, gradients, states of the optimizer, buffers
    """

    forward: float = 0.0
    backward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    kept: float = 0.0
    again: float = 0.0
    input: float = 0.0
    waiting: float = 0.0
    crossing: float = 0.0
    state: float = 0.0


@dataclass(frozen=True)
class CellCosts:
    """What a cell takes beside its layers, in seconds, and a step beside its cells.

    Attributes:
        forward: F
        backward: B
        inputs: I
        weights: W
        step: what a step takes beside its cells
        factor: a measured step over its simulation: waking up, and cores that are shared
    """

    forward: float = 0.0
    backward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    step: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Device:
    """A device, as a plan sees it.

    Attributes:
        name: its name
        memory: the bytes that a plan may use; infinite if there is no limit
        slowness: the time that it takes, relative to the device that was measured
    """

    name: str
    memory: float = math.inf
    slowness: float = 1.0


@dataclass(frozen=True)
class Choice:
    """A decision.

    Attributes:
        balance: the number of layers in each partition
        recomputed: the positions of the layers that are recomputed
    """

    balance: tuple[int, ...]
    recomputed: frozenset[int] = frozenset()


class PartitionCost(NamedTuple):
    """What a partition takes.

    Attributes:
        seconds: of each kind of action, for a micro-batch
        kept: bytes that a micro-batch keeps, from F to B or W
        waiting: bytes that a micro-batch keeps besides, from I to W
        room: bytes for the largest recomputed layer
        state: bytes that are there all the time
        arriving: bytes that arrive at its beginning
    """

    seconds: dict[str, float]
    kept: float
    waiting: float
    room: float
    state: float
    arriving: float


class Outcome(NamedTuple):
    """What a choice costs.

    Attributes:
        choice: the choice
        simulation: the simulated step; its peaks are bytes of activations, without the room for recomputed layers
        state: for each device, the bytes that are there all the time
        memory: for each device, the most bytes that it needs, all in all
    """

    choice: Choice
    simulation: Simulation
    state: list[float]
    memory: list[float]

    @property
    def seconds(self) -> float:
        """The simulated time of a step."""
        return self.simulation.seconds


@dataclass(frozen=True, eq=False, repr=False)
class FittedSchedule:
    """A schedule: the fastest program for the times of partitions, in the memory of their devices.

    Attributes:
        problem: the problem
        partitions: what each partition takes
        limits: the bytes of activations that each device may keep
    """

    problem: Problem
    partitions: tuple[PartitionCost, ...]
    limits: tuple[float, ...]

    def __call__(self, m: int, places: Sequence[int]) -> Program:
        """Return the program for ``m`` micro-batches."""
        return _fitted(self, m, tuple(places))

    @property
    def least_seconds(self) -> float:
        """A time that no program of these partitions falls below."""
        problem = self.problem
        terms = problem.terms(self.partitions)
        work, _, unit = work_of(problem.m, problem.places, terms, self.limits, problem.splits)
        return least_time(work) * unit


@lru_cache(maxsize=32)  # Every step asks for its program.
def _fitted(schedule: FittedSchedule, m: int, places: tuple[int, ...]) -> Program:
    terms, problem = schedule.problem.terms(schedule.partitions), schedule.problem
    return fastest(m, places, **terms._asdict(), limits=schedule.limits, split=problem.splits)


@dataclass(frozen=True)
class Problem:
    """Layers to spread over devices, under one program.

    Attributes:
        layers: the layers, in order
        devices: the devices
        places: the index of the device of each partition
        program: the actions of each device, which can run
        cell: what cells and a step take besides
        latency: seconds that any transfer between devices takes
        per_byte: seconds that a transfer takes for each byte besides
        recomputes: whether layers may be recomputed, if the program allows it
        schedule: the name of the schedule that the program is of
        chunks: the number of micro-batches that were asked for; there may be fewer
    """

    layers: tuple[Layer, ...]
    devices: tuple[Device, ...]
    places: tuple[int, ...]
    program: Program
    cell: CellCosts = CellCosts()
    latency: float = 0.0
    per_byte: float = 0.0
    recomputes: bool = True
    schedule: ScheduleName = "1F1B"
    chunks: int = 1

    def predicted(self, simulated: float) -> float:
        """Return the predicted seconds of a step, given its simulated seconds."""
        return simulated * self.cell.factor + self.cell.step

    @property
    def m(self) -> int:
        """The number of micro-batches."""
        return 1 + max([action.i for row in self.program for action in row])

    @property
    def splits(self) -> bool:
        """Whether the program has I and W in place of B."""
        return any(action.kind == "I" for actions in self.program for action in actions)

    @property
    def may_recompute(self) -> bool:
        """Whether layers may be recomputed: not in a program that splits backward."""
        return self.recomputes and not self.splits

    def partition_cost(self, j: int, start: int, end: int, recomputed: Collection[int] = ()) -> PartitionCost:
        """Return what partition ``j`` takes if it has the layers from ``start`` to ``end``."""
        layers = self.layers[start:end]
        run_twice = [self.layers[k] for k in recomputed if start <= k < end]
        cell, slowness = self.cell, self.devices[self.places[j]].slowness
        backward = sum([layer.backward for layer in layers])
        seconds = {
            "F": cell.forward * (1 + len(run_twice)) + sum([layer.forward for layer in layers]),
            "B": cell.backward * (1 + len(run_twice)) + backward + sum([layer.forward for layer in run_twice]),
            "I": cell.inputs + sum([layer.inputs for layer in layers]) if j else 0.0,
            "W": cell.weights + sum([layer.weights for layer in layers]) if j else cell.backward + backward,
        }
        kept = sum([layer.kept for layer in layers]) - sum([layer.kept - layer.input for layer in run_twice])
        return PartitionCost(
            seconds={kind: of_kind * slowness for kind, of_kind in seconds.items()},
            kept=kept + layers[0].again,
            waiting=sum([layer.waiting for layer in layers]),
            room=max([layer.kept for layer in run_twice], default=0.0),
            state=sum([layer.state for layer in layers]),
            arriving=self.layers[start - 1].crossing if start else 0.0,
        )

    def partitions(self, choice: Choice) -> list[PartitionCost]:
        """Return what each partition of a choice takes."""
        spans = pairwise(accumulate(choice.balance, initial=0))
        return [self.partition_cost(j, *span, choice.recomputed) for j, span in enumerate(spans)]

    def outcome(self, choice: Choice) -> Outcome:
        """Return what a choice costs."""
        partitions = self.partitions(choice)
        simulation = simulate(self.program, **self.terms(partitions)._asdict())
        state, memory = [], []
        for peak, placed in zip(simulation.peaks, self._placed(partitions)):
            state.append(sum([cost.state for cost in placed]))
            memory.append(peak + state[-1] + max([cost.room for cost in placed], default=0.0))
        return Outcome(choice, simulation, state, memory)

    def terms(self, partitions: Sequence[PartitionCost]) -> Terms:
        """Return what actions take on paper."""
        return Terms(
            costs=lambda action: partitions[action.j].seconds[action.kind],
            memory=[cost.kept for cost in partitions],
            waiting=[cost.waiting for cost in partitions],
            recomputed=None,
            transfer=lambda action: self.latency + self.per_byte * partitions[action.j].arriving,
        )

    def _placed(self, partitions: Sequence[PartitionCost]) -> list[list[PartitionCost]]:
        return [
            [cost for cost, place in zip(partitions, self.places) if place == device]
            for device in range(len(self.devices))
        ]

    def fitted(self, choice: Choice) -> FittedSchedule:
        """Return the schedule that is fastest for a choice, in the memory that is there."""
        partitions = self.partitions(choice)
        limits = [
            device.memory - sum([cost.state for cost in placed]) - max([cost.room for cost in placed], default=0.0)
            for device, placed in zip(self.devices, self._placed(partitions))
        ]
        return FittedSchedule(self, tuple(partitions), tuple(limits))

    def excess(self, outcome: Outcome) -> float:
        """Return the most bytes by which a device needs more memory than it has; 0 or less if all fits."""
        return max([need - device.memory for need, device in zip(outcome.memory, self.devices)])
