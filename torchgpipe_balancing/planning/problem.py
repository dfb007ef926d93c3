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
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from torchgpipe.schedule import Program, ScheduleName, Simulation, simulate

__all__ = ["NAMES", "CellCosts", "Choice", "Device", "Layer", "Outcome", "PartitionCost", "Problem"]


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
        first: seconds that the first backward of a step takes longer, in which gradients get their memory
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
    first: float = 0.0


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
    def may_recompute(self) -> bool:
        """Whether layers may be recomputed: not in a program that has I and W in place of B."""
        return self.recomputes and not any(action.kind == "I" for actions in self.program for action in actions)

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

    def outcome(self, choice: Choice) -> Outcome:
        """Return what a choice costs."""
        spans = list(pairwise(accumulate(choice.balance, initial=0)))
        partitions = [self.partition_cost(j, *span, choice.recomputed) for j, span in enumerate(spans)]
        simulation = simulate(
            self.program,
            lambda action: partitions[action.j].seconds[action.kind],
            lambda action: partitions[action.j].kept,
            waiting=lambda action: partitions[action.j].waiting,
            transfer=lambda action: self.transfer(partitions[action.j]),
        )
        state, memory = [], []
        for device, peak in enumerate(simulation.peaks):
            placed = [cost for cost, place in zip(partitions, self.places) if place == device]
            state.append(sum([cost.state for cost in placed]))
            memory.append(peak + state[-1] + max([cost.room for cost in placed], default=0.0))
        return Outcome(choice, simulation, state, memory)

    def transfer(self, partition: PartitionCost) -> float:
        """Return the seconds of a transfer to a partition from another device."""
        return self.latency + self.per_byte * partition.arriving

    def excess(self, outcome: Outcome) -> float:
        """Return the most bytes by which a device needs more memory than it has; 0 or less if all fits."""
        return max([need - device.memory for need, device in zip(outcome.memory, self.devices)])
