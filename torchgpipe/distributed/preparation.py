"""Prepare steps: find the shapes at the boundaries, and make a schedule with buffers for them.

A schedule of PyTorch's has a fixed number of micro-batches, and its communication buffers have fixed shapes. So there
is one `PreparedStep` for each shape of a mini-batch, with and without backward.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.distributed.boundary import Boundary, leaves_of, on_meta
from torchgpipe.distributed.fake_model import FakeModel
from torchgpipe.distributed.prepared_step import PreparedStep
from torchgpipe.distributed.processes import Processes
from torchgpipe.distributed.schedules import fill_drain, is_interleaved, name_of
from torchgpipe.distributed.stage import WatchedPipelineStage, WiredPartition
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition

__all__ = ["Preparation"]

#: The number of prepared steps to keep. Each holds the buffers of its micro-batches. Four are enough for training and
#: evaluation, each with a smaller last mini-batch.
_MOST = 4


class Preparation:
    """Prepare steps, and keep them for the next mini-batches of the same shapes.

    Args:
        schedule: PyTorch's class of the schedule
        fake: the whole model without data
        partitions: the partitions of this process
        processes: the processes of the pipeline
        device: where this process computes
    """

    def __init__(
        self,
        schedule: Any,
        fake: FakeModel,
        partitions: Sequence[Partition],
        processes: Processes,
        device: torch.device,
    ) -> None:
        self._schedule = schedule
        self._fake = fake
        self._partitions = partitions
        self._processes = processes
        self._device = device
        self._kept: dict[Any, PreparedStep] = {}

    def clear(self) -> None:
        """Drop all prepared steps, after one has failed in the middle."""
        self._kept.clear()

    def verify(self, chunks: int) -> None:
        """Check that the schedule can run ``chunks`` micro-batches.

        Raises:
            ValueError: the schedule cannot.
        """
        sample = Boundary([Batch((torch.empty(1, device="meta"),))] * chunks, "a sample")
        self._make([sample] * (len(self._fake.partitions) + 1), 0, self._schedule)

    def step(
        self, model: nn.Module, inputs: list[Batch], *, backward: bool, chunks: int, checkpoint: str
    ) -> PreparedStep:
        """Return the prepared step for these micro-batches; make it if they have new shapes.

        Args:
            model: the layers of this process, in the mode of the step
            inputs: the micro-batches
            backward: whether the step differentiates a loss
            chunks: the number of micro-batches of a full mini-batch
            checkpoint: the checkpoint mode, which must be the same in all processes

        Raises:
            Exception: what a layer raises on tensors without data.

        Warns:
            UserWarning: a smaller mini-batch has too few micro-batches for the schedule, and another schedule runs it.
        """
        forms = [on_meta(batch) for batch in inputs]
        described = [_describe(form) for form in forms]
        frozen = tuple([not parameter.requires_grad for parameter in model.parameters()])
        key = (tuple(described), backward, model.training, checkpoint, frozen)
        if key not in self._kept:
            self._fake.follow(model)
            distinct = {text: self._fake.forms(form) for text, form in zip(described, forms)}
            columns = zip(*[distinct[text] for text in described])
            boundaries = [Boundary(column, f"the output of stage {j - 1}") for j, column in enumerate(columns)]
            settings = [name_of(self._schedule), [len(part) for part in self._fake.partitions], checkpoint]
            agreed = [*settings, backward, model.training, *[list(map(_describe, b.forms)) for b in boundaries]]
            checksum = zlib.crc32(repr(agreed).encode())
            if len(self._kept) == _MOST:
                self._kept.clear()
            self._kept[key] = self._fitting(boundaries, checksum, backward, chunks)
        return self._kept[key]

    def _fitting(self, boundaries: list[Boundary], checksum: int, backward: bool, chunks: int) -> PreparedStep:
        """Prepare a step under the schedule, or under one that runs any number of micro-batches."""
        m, drain = len(boundaries[0].forms), fill_drain(self._schedule)
        if backward:
            try:
                return self._make(boundaries, checksum, self._schedule)
            except ValueError as error:
                if m == chunks:
                    raise
                # The last mini-batch of an epoch may be too small, and an error here would end the training.
                warnings.warn(
                    f"a mini-batch that is split into {m} micro-batches and not into chunks={chunks} cannot run under "
                    f"schedule='{name_of(self._schedule)}' and runs under '{name_of(drain)}', where each stage holds "
                    f"all {m} micro-batches until backward begins; to keep the schedule, leave it out (drop_last=True "
                    "of a DataLoader) or make it as large as the others. PyTorch says: "
                    f"{' '.join(str(error).split())}",
                    stacklevel=5,  # the caller of DistributedGPipe.step
                )
        return self._make(boundaries, checksum, drain, backward)

    def _make(self, boundaries: list[Boundary], checksum: int, schedule: Any, backward: bool = True) -> PreparedStep:
        indices, n, m = self._processes.stages, len(boundaries) - 1, len(boundaries[0].forms)
        wired = [WiredPartition(j, part, self._device, boundaries) for j, part in zip(indices, self._partitions)]
        stages = [
            WatchedPipelineStage(part, j, n, self._device, self._processes.pipeline_group)
            for j, part in zip(indices, wired)
        ]
        run: Any = stages if is_interleaved(schedule) else stages[0]
        ready = schedule(run, m, loss_fn=_passed_on if backward else None, scale_grads=False)
        return PreparedStep(ready, wired, stages, boundaries[-1].forms, checksum)


def _passed_on(loss: Tensor, number: Tensor) -> Tensor:
    return loss  # `WiredPartition` has computed the loss already.


def _describe(form: Batch) -> str:
    leaves = [leaf if leaf is None else (leaf.dtype, tuple(leaf.shape), leaf.requires_grad) for leaf in leaves_of(form)]
    return f"{form.spec} {leaves}"
