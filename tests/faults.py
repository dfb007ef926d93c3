"""Layers that note their runs, and fail on demand, in the cells and phases of a `Plan`.

A micro-batch is one row whose first number is the index of the micro-batch, so that a layer knows its cell. Phases are
``forward``, ``recomputation``, ``backward`` and ``weight``, where the gradient of a weight is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import is_checkpointing, is_recomputing

__all__ = ["Cell", "Fault", "Layer", "Plan", "build", "note", "rows"]

Cell = tuple[int, int]

#: What is raised, or called.
What: TypeAlias = BaseException | type[BaseException] | Callable[[], object]


class Fault(Exception):
    """An exception that cannot be constructed without arguments, like many exceptions of users."""

    def __init__(self, cell: Cell, phase: str) -> None:
        super().__init__(f"{cell} fails during {phase}")
        self.cell = cell
        self.phase = phase


class Plan:
    """The cells that fail and their phases, and what is noted of those that run.

    Attributes:
        faults: by cell and phase, what is raised or called
        runs: what has run, in order
        checkpoints: the cells that have run as checkpoints, in order
        alive_before: by recomputed cell, which other recomputed results were in memory
        storages: the results
    """

    def __init__(self) -> None:
        self.faults: dict[tuple[Cell, str], What] = {}
        self.runs: list[tuple[Cell, str]] = []
        self.checkpoints: list[Cell] = []
        self.alive_before: dict[Cell, set[Cell]] = {}
        self.storages: dict[tuple[Cell, str], StorageWeakRef] = {}

    def add(self, cell: Cell, phase: str, error: What = Fault) -> None:
        self.faults[cell, phase] = error

    def enter(self, cell: Cell, phase: str) -> None:
        self.runs.append((cell, phase))
        error = self.faults.get((cell, phase))
        if isinstance(error, type):
            raise error(cell, phase)
        if isinstance(error, BaseException):
            raise error
        if error is not None:
            error()

    def of(self, phase: str) -> list[Cell]:
        """Return the cells that have run in a phase, in order."""
        return [cell for cell, its_phase in self.runs if its_phase == phase]

    def alive(self, phase: str) -> set[Cell]:
        """Return the cells whose results of a phase are still in memory."""
        return {cell for (cell, its), storage in self.storages.items() if its == phase and not storage.expired()}


class Layer(nn.Module):
    """A layer that computes and counts, and fails where the plan says so."""

    count: Tensor

    def __init__(self, plan: Plan, j: int) -> None:
        super().__init__()
        self.plan, self.j = plan, j
        self.weight = nn.Parameter(torch.full((2,), 0.5 + j, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(1).double()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, input: Tensor) -> Tensor:
        cell = int(input[0, 0].item()), self.j
        if is_recomputing():
            self.plan.alive_before[cell] = self.plan.alive("recomputation")
        weight = self.weight * 1
        self.watch(weight, cell, "weight")
        result = (input[:, 1:] * weight).sin() + input[:, :1] * 0
        phase = "recomputation" if is_recomputing() else "forward"
        self.plan.storages[cell, phase] = StorageWeakRef(result.untyped_storage())
        self.watch(result, cell, "backward")
        self.plan.checkpoints += [cell] * is_checkpointing()
        self.plan.enter(cell, phase)
        if not is_recomputing():
            self.count += 1
        return torch.cat([input[:, :1], self.norm(result[:, None])[:, 0]], dim=1)

    def watch(self, tensor: Tensor, cell: Cell, part: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.plan.enter(cell, part))


def build(plan: Plan, n: int) -> nn.Sequential:
    return nn.Sequential(*[layer for j in range(n) for layer in (Layer(plan, j), nn.Identity())])


def rows(m: int) -> Tensor:
    x = torch.linspace(-1, 1, 3 * m, dtype=torch.float64).reshape(m, 3)
    x[:, 0] = torch.arange(m)
    return x


def note(cell: Cell, m: int, device: str, phase: str) -> str:
    i, j = cell
    return f"micro-batch {i} of {m}, partition {j} (layers '{2 * j}'..'{2 * j + 1}') on {device}, during {phase}"
