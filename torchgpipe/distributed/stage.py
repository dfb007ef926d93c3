"""Run the cells of a partition as a stage of PyTorch's pipelining.

A schedule of PyTorch's runs the stages of a process, forward and backward, and sends tensors between processes. Here it
is given the number of each micro-batch only. `WiredPartition` looks up the micro-batch of that number in the
`StepCall`, and computes it in a cell, as a pipeline in one process does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from torchgpipe.cell.layers_column import LayersColumn
from torchgpipe.devices.stream import Streams
from torchgpipe.distributed.boundary import Boundary
from torchgpipe.drive.autograd import Mode, pass_through
from torchgpipe.model.microbatch import Batch
from torchgpipe.model.partition import Partition
from torchgpipe.replay.ambient import Ambient
from torchgpipe.replay.random import RandomStates
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.transport.portal import Portal

__all__ = ["StepCall", "WatchedPipelineStage", "WiredPartition", "verify_release"]


def verify_release() -> None:
    """Raise a :exc:`RuntimeError` if PyTorch's stages cannot do what the stages of a pipeline need."""
    # A function: tests take the place of the version.
    if torch.__version__ < "2.13":
        raise RuntimeError(
            "DistributedGPipe needs PyTorch 2.13 or later, because stages of older releases cannot receive tensors "
            f"without gradients; this is {torch.__version__}. GPipe and pipelined run with it."
        )


@dataclass
class StepCall:
    """The data of one step, for all stages of a process.

    Attributes:
        inputs: the micro-batches; on the meta device in a process without the first stage
        checkpoint_stop: the number of micro-batches that are checkpointed
        finish: takes the number and the output of a micro-batch, and returns its loss, of shape (1,)
    """

    inputs: list[Batch]
    checkpoint_stop: int
    finish: Callable[[int, Batch], Tensor]


class WiredPartition(nn.Module):
    """A partition that takes and returns the tensors that are sent between processes.

    Args:
        j: the index of the partition
        partition: its layers
        device: where the layers are
        boundaries: the boundaries before and after each partition of the pipeline
    """

    def __init__(self, j: int, partition: Partition, device: torch.device, boundaries: list[Boundary]) -> None:
        super().__init__()
        self.partition = partition
        self._j = j
        self._device = device
        self._last = j == len(boundaries) - 2
        self._arriving = boundaries[j] if j > 0 else None
        self._leaving = boundaries[j + 1]

    def buffers_in(self) -> tuple[Tensor, ...]:
        """Return the tensors that are received for a micro-batch, on the meta device."""
        return () if self._arriving is None else self._arriving.buffers

    def buffers_out(self) -> tuple[Tensor, ...]:
        """Return the tensors that are sent for a micro-batch, on the meta device."""
        return (torch.empty(1, device="meta"),) if self._last else self._leaving.buffers

    def begin(self, call: StepCall, layout: SkipLayout) -> None:
        """Prepare for the micro-batches of ``call``."""
        self._call = call
        modules = list(self.partition.modules())
        self._column = LayersColumn(
            self._j,
            self.partition,
            modules,
            Streams().current(self._device),
            len(call.inputs),
            arriving=None,
            leaving=None,
            sending=[Portal(key, None) for key, _, _ in layout.leaving[self._j]],
            receiving=[Portal(key, None) for key, _, _ in layout.arriving[self._j]],
            ambient=Ambient(),
            random=RandomStates(self._device, modules, beside=False, between=True),
            ordered=False,
        )

    def end(self) -> None:
        """Drop the call, and with it the micro-batches."""
        del self._call, self._column

    def forward(self, *wires: Tensor, i: Tensor) -> Tensor | tuple[Tensor, ...]:
        number, call = int(i), self._call
        batch = call.inputs[number] if self._arriving is None else self._arriving.unpack(number, wires)
        mode: Mode = "checkpoint" if number < call.checkpoint_stop else "plain"
        batch, _ = pass_through(self._column, number, batch, None, mode)
        if self._last:
            return call.finish(number, batch)
        return self._leaving.pack(number, batch)


class WatchedPipelineStage(PipelineStage):
    """A stage of PyTorch's that records what it waits for, so that an error can name it.

    Attributes:
        awaited: from 'input' or 'gradient' and the micro-batch to the index of the stage that should send it
        neighbours: the indices of the stages before and after this one
    """

    def __init__(self, module: WiredPartition, j: int, n: int, device: torch.device, group: Any) -> None:
        inputs, outputs = module.buffers_in(), module.buffers_out()
        super().__init__(module, j, n, device, input_args=inputs, output_args=outputs, group=group)
        self.awaited: dict[tuple[str, int], int] = {}
        self.neighbours = [k for k in (j - 1, j + 1) if 0 <= k < n]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if not self.is_first:
            self.awaited["input", fwd_chunk_id] = self.stage_index - 1
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.awaited.pop(("input", fwd_chunk_id), None)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if not self.is_last and self.has_backward:
            self.awaited["gradient", bwd_chunk_id] = self.stage_index + 1
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.awaited.pop(("gradient", bwd_chunk_id), None)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
