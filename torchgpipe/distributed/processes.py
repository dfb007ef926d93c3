"""The processes of a pipeline: they agree on each step, exchange values, and name each other in errors.

A process that cannot prepare a step, or prepares another one than the others, must not begin to send: its neighbours
would wait for ever, or receive tensors of the wrong shapes. So all processes agree before the first tensor is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Processes"]


class Processes:
    """The processes of this pipeline, and the processes with the same stages in its replicas.

    Args:
        mesh: (stages,) or (replicas, stages); None for one pipeline of all processes
        timeout: how long a process waits for another; None for the timeouts of the existing groups
        partitions: the number of partitions of the pipeline

    Attributes:
        pipeline_group: the processes of this pipeline
        replica_group: the processes with the same stages; None if there are no replicas
        rank: the rank of this process in the pipeline
        size: the number of processes of the pipeline
        stages: the indices of the partitions of this process
        step: the number of the current step

    Raises:
        ValueError: the mesh has another number of dimensions.
        RuntimeError: there is no process group.
    """

    def __init__(self, mesh: DeviceMesh | None, timeout: timedelta | None, partitions: int) -> None:
        self.pipeline_group, self.replica_group = _groups(mesh, timeout)
        self.rank, self.size = dist.get_rank(self.pipeline_group), dist.get_world_size(self.pipeline_group)
        self.stages = list(range(self.rank, partitions, self.size))
        self.step = 0
        self._partitions = partitions

    @property
    def place(self) -> str:
        """The rank and the stages of this process, as text."""
        place = f"rank {dist.get_rank()}, stage {_listed(self.stages)} of {self._partitions}"
        return place if self.replica_group is None else f"{place} in replica {self.replica}"

    @property
    def replica(self) -> int:
        """The index of this process's pipeline among its replicas."""
        return 0 if self.replica_group is None else dist.get_rank(self.replica_group)

    def owner(self, j: int) -> int:
        """Return the rank in the pipeline of the process that has partition ``j``."""
        return j % self.size

    @property
    def last(self) -> int:
        """The rank in the pipeline of the process that has the last partition."""
        return self.owner(self._partitions - 1)

    def agree(self, checksum: int, weight: float, device: torch.device, *, failed: bool) -> float:
        """Wait until all processes are ready for the same step.

        Args:
            checksum: a number that is equal for equal steps
            weight: the weight of the targets; it counts in the process of the last stage only
            device: where to exchange these numbers
            failed: whether this process could not prepare the step. The caller raises the error that says why.

        Returns:
            the weight of the targets of all replicas

        Raises:
            RuntimeError: another process has failed, prepares another step, has ended, or does not answer.
        """
        mine = torch.tensor([float(failed), float(checksum), weight], dtype=torch.float64, device=device)
        replies = [torch.empty_like(mine) for _ in range(self.size)]
        with self.exchanging("whether all are ready", self.pipeline_group):
            dist.all_gather(replies, mine, group=self.pipeline_group)
        rows = torch.stack(replies).tolist()
        refused = [rank for rank, row in enumerate(rows) if row[0]]
        others = [rank for rank, row in enumerate(rows) if row[1] != checksum]
        together = torch.tensor([len(refused) + len(others), rows[self.last][2]], dtype=torch.float64, device=device)
        self.add_replicas(together, "whether all replicas are ready")
        faults, total = map(float, together.tolist())
        if failed or not faults:
            return total
        ranks = _listed([dist.get_global_rank(self.pipeline_group, rank) for rank in (refused or others)])
        if refused:
            raise RuntimeError(f"rank {ranks} could not prepare the step, and says why; nothing was sent")
        if others:
            raise RuntimeError(
                f"rank {ranks} prepares another step: balance, schedule, chunks, checkpoint, the shapes of the input, "
                "train() or eval(), grad mode and what requires grad must be the same in all processes; measure a "
                "balance in one process and send it to the others, and freeze layers before the model is wrapped. "
                "Nothing was sent"
            )
        raise RuntimeError("another replica could not prepare the step, and says why; nothing was sent")

    def receive_from_last(self, tensor: Tensor, what: str) -> None:
        """Give ``tensor`` the values that it has in the process of the last stage."""
        with self.exchanging(what, self.pipeline_group):
            dist.broadcast(tensor, group=self.pipeline_group, group_src=self.last)

    def add_replicas(self, tensor: Tensor, what: str) -> None:
        """Add to ``tensor`` its values in all other replicas."""
        if self.replica_group is not None:
            with self.exchanging(what, self.replica_group):
                dist.all_reduce(tensor, group=self.replica_group)

    @contextmanager
    def at_step(self) -> Iterator[None]:
        """Add a note to an error that says in which process and at which step it was raised."""
        try:
            yield
        except Exception as error:
            error.add_note(f"{self.place} at step {self.step}")
            raise

    @contextmanager
    def exchanging(self, what: str, group: Any) -> Iterator[None]:
        """Name this process and the others of ``group`` in the error of a collective operation."""
        try:
            yield
        except RuntimeError as error:
            others = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
            self.lost(error, what, others, group)

    def lost(self, error: Exception, what: str, peers: Sequence[int], group: Any = None) -> NoReturn:
        """Raise an error that says what this process has waited for.

        Args:
            error: PyTorch's error
            what: what this process has waited for
            peers: the ranks in the group of the processes that should have sent it
            group: a group of processes (default: the pipeline)
        """
        ranks = [dist.get_global_rank(group or self.pipeline_group, peer) for peer in peers]
        raise RuntimeError(
            f"{self.place} has waited in step {self.step} for {what} from rank {_listed(ranks)}, in vain: {error}; "
            "read the error of that process, and start all of them again from the last checkpoint"
        ) from error


def _groups(mesh: DeviceMesh | None, timeout: timedelta | None) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    if not dist.is_initialized():
        raise RuntimeError(
            "DistributedGPipe needs a process group: call torch.distributed.init_process_group(...) first, in every "
            "process, which torchrun starts; in a single process, use GPipe"
        )
    if mesh is None:
        group = dist.group.WORLD if timeout is None else dist.new_group(timeout=timeout)
        assert group is not None
        return group, None
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh must have the dimensions (stages,) or (replicas, stages), but has shape {mesh.shape}")
    if timeout is None:
        return mesh.get_group(mesh.ndim - 1), (mesh.get_group(0) if mesh.ndim == 2 else None)
    make: Any = dist.new_subgroups_by_enumeration
    ranks = mesh.mesh.view(-1, mesh.size(mesh.ndim - 1))
    groups = [make(each.tolist(), timeout=timeout)[0] for each in (ranks, ranks.T)]
    return groups[0], (groups[1] if mesh.ndim == 2 else None)


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers as text, with commas."""
    return ", ".join(map(str, numbers))
