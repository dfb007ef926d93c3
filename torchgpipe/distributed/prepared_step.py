"""Run a step under one of PyTorch's schedules, which was prepared for mini-batches of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchgpipe.distributed.processes import Processes
from torchgpipe.distributed.stage import StepCall, WatchedPipelineStage, WiredPartition
from torchgpipe.model.microbatch import Batch
from torchgpipe.skip.layout import SkipLayout

__all__ = ["PreparedStep"]


@dataclass
class PreparedStep:
    """A schedule and its stages, for mini-batches of one shape.

    Attributes:
        schedule: a schedule of PyTorch's
        partitions: the partitions of this process
        stages: PyTorch's stages around the partitions
        outputs: the form of each micro-batch's output
        checksum: a number that is equal in all processes that have prepared the same step
        inputs: the micro-batches of the current step
    """

    schedule: Any
    partitions: list[WiredPartition]
    stages: list[WatchedPipelineStage]
    outputs: Sequence[Batch]
    checksum: int
    inputs: list[Batch] = field(default_factory=list)

    def run(self, call: StepCall, layout: SkipLayout, processes: Processes) -> None:
        """Run the stages of this process, forward and backward.

        Raises:
            RuntimeError: another process has gone or does not answer.
            Exception: what a layer raises.
        """
        for partition in self.partitions:
            partition.begin(call, layout)
        numbers = torch.arange(len(call.inputs))
        try:
            self.schedule.step(i=numbers, target=numbers)
        except Exception as error:
            if error.__cause__ is not None:  # PyTorch wraps the error of a layer in one of its own.
                raise error.__cause__ from error.__cause__.__cause__
            processes.lost(error, *self._awaited(processes))
        finally:
            self._end()

    def _awaited(self, processes: Processes) -> tuple[str, list[int]]:
        """Return what this process waits for, and the ranks in the pipeline of the processes that should send it."""
        for stage in self.stages:
            for (what, i), neighbour in stage.awaited.items():
                return f"the {what} of micro-batch {i}", [processes.owner(neighbour)]
        neighbours = {processes.owner(k) for stage in self.stages for k in stage.neighbours}
        return "room for what it sends", sorted(neighbours)

    def _end(self) -> None:
        """Drop the tensors of the step."""
        self.inputs = []
        for partition in self.partitions:
            partition.end()
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.awaited.clear()
