"""What PyTorch's schedules need to run a mini-batch, made once for mini-batches of one shape.

A schedule orders the micro-batches of the stages of a process. Its communication buffers have a shape, so there
is one of it for each shape of a mini-batch, for training and without.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from torchgpipe.distributed.boundary import Boundary
from torchgpipe.distributed.processes import Processes
from torchgpipe.distributed.stage import StageModule, WatchedStage
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition
from torchgpipe.model.settings import CheckpointMode, verify_checkpoint

__all__ = ["Plan", "ScheduleName", "make_plan", "name_of", "verify_fit", "verify_schedule"]

#: PyTorch's names of schedules, without the word Schedule.
ScheduleName: TypeAlias = Literal["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"]

#: By PyTorch's names without the word Schedule, in any case: what runs one stage in each process, and what several.
_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL: dict[str, Any] = {
    "loopedbfs": ScheduleLoopedBFS,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
}


@dataclass
class Plan:
    """How to run mini-batches of one shape.

    Attributes:
        schedule: PyTorch's
        modules: what it calls, one for each stage of this process
        stages: PyTorch's stages around them
        outputs: the form of each micro-batch's output
        checksum: equal in all processes that have the same plan
        batches: the micro-batches of the step that is under way
    """

    schedule: Any
    modules: list[StageModule]
    stages: list[WatchedStage]
    outputs: Sequence[Batch]
    checksum: int = 0
    batches: list[Batch] = field(default_factory=list)

    def awaited(self, owner: Callable[[int], int]) -> tuple[str, list[int]]:
        """What these stages wait for, and from which ranks of the pipeline: from one, if they wait for input."""
        for stage in self.stages:
            for (what, i), neighbour in stage.awaited.items():
                return f"the {what} of micro-batch {i}", [owner(neighbour)]
        neighbours = {owner(k) for stage in self.stages for k in stage.neighbours}
        return "room for what it sends", sorted(neighbours)

    def end(self) -> None:
        """Lets go of what belongs to a step."""
        self.batches = []
        for module in self.modules:
            module.end()
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.awaited.clear()


def make_plan(
    schedule: Any,
    partitions: Sequence[Partition],
    processes: Processes,
    device: torch.device,
    boundaries: list[Boundary],
    *,
    chunks: int,
    backward: bool,
) -> Plan:
    """Prepares for mini-batches of one shape.

    Args:
        schedule: the kind of schedule
        partitions: those of this process
        boundaries: before and after each partition of the pipeline
        chunks: the most micro-batches that a mini-batch can be split into
        backward: whether there is a loss, and it is differentiated

    Raises:
        ValueError: the schedule cannot do with as many micro-batches as ``chunks`` says.

    Warns:
        UserWarning: it cannot do with those of a smaller mini-batch, which another schedule runs.
    """
    n, m = len(boundaries) - 1, len(boundaries[0].forms)
    modules = [StageModule(j, p, device, boundaries) for j, p in zip(processes.stages, partitions)]
    stages = [WatchedStage(module, j, n, device, processes.pipeline) for j, module in zip(processes.stages, modules)]
    several = schedule in _SEVERAL.values()
    drain: Any = ScheduleLoopedBFS if several else ScheduleGPipe
    made: Any = stages if several else stages[0]
    if not backward:
        ready = drain(made, m)
    else:
        try:
            ready = schedule(made, m, loss_fn=_passed_on, scale_grads=False)
        except ValueError as error:
            if m == chunks:
                raise
            # The last mini-batch of an epoch may be too small, and nobody wants to lose an epoch for that.
            warnings.warn(
                f"a mini-batch that is split into {m} micro-batches and not into chunks={chunks} cannot run under "
                f"schedule='{name_of(schedule)}' and runs under '{name_of(drain)}', where each stage holds all {m} "
                f"micro-batches until backward begins; to keep the schedule, leave it out (drop_last=True of a "
                f"DataLoader) or make it as large as the others. PyTorch says: {' '.join(str(error).split())}",
                stacklevel=6,  # who has called step()
            )
            ready = drain(made, m, loss_fn=_passed_on, scale_grads=False)
    return Plan(ready, modules, stages, boundaries[-1].forms)


def _passed_on(loss: Tensor, number: Tensor) -> Tensor:
    return loss  # The last stage has computed it.


def verify_schedule(name: str, partitions: int, processes: int) -> Any:
    """The kind of schedule of this name.

    Raises:
        ValueError: there is none, or it does not fit the numbers of partitions and processes.
    """
    known = {**_SINGLE, **_SEVERAL}
    schedule = known.get(name.lower())
    if schedule is None:
        raise ValueError(f"schedule is not one of {', '.join(map(name_of, known.values()))}, but {name!r}")
    if name.lower() in _SINGLE and partitions != processes:
        raise ValueError(
            f"{name} has one stage in each process, but there are {partitions} partitions in the balance and "
            f"{processes} processes in a pipeline; for several stages in each, use schedule='Interleaved1F1B'"
        )
    if partitions % processes:
        raise ValueError(
            f"the number of partitions must be a multiple of that of the processes in a pipeline, but there are "
            f"{partitions} and {processes}"
        )
    return schedule


def name_of(schedule: Any) -> str:
    """Return the name of a kind of schedule, without the word Schedule."""
    name: str = schedule.__name__
    return name.removeprefix("Schedule")


def verify_fit(checkpoint: Any, schedule: Any) -> CheckpointMode:
    """The checkpoint mode, once it fits the schedule.

    Raises:
        ValueError: it is none, or does not.
    """
    mode = verify_checkpoint(checkpoint)
    if schedule is ScheduleInterleavedZeroBubble and mode != "never":
        raise ValueError(
            "the zero bubble schedule differentiates each micro-batch twice, which would also compute it again twice; "
            "use checkpoint='never'"
        )
    return mode
