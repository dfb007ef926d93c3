"""Replicas: processes that hold the same layers, and each train on a part of every mini-batch.

They agree before a step that all have prepared it, after its last cell that all have run it, and at last that all hooks
of parameters have run. So a replica that fails keeps the gradients of all replicas as they were, and none waits for
another. Gradients are reduced once in a step, after the last cell: in buckets, which take little memory beside the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.typing import Leaf
from torchgpipe.processes.processes import Processes

__all__ = ["MeshReplicas", "Replicas", "add_gradients"]

#: The bytes of gradients that are reduced at once. More would take more memory, and less would cost latency.
_BUCKET = 32 * 2**20


class Replicas:
    """The replicas of a pipeline in one process each.

    Args:
        group: the processes that hold the same layers; None if there is this process only
        device: where numbers are exchanged

    Attributes:
        group: the processes
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self._device = device

    @property
    def exist(self) -> bool:
        """Whether there are other processes."""
        return self.group is not None

    def begin_equal(self, module: nn.Module) -> None:
        """Give all replicas the parameters and buffers of the first one."""
        if self.group is not None:
            tensors = [tensor for tensor in [*module.parameters(), *module.buffers()] if not is_lazy(tensor)]
            with self.together("the construction of a pipeline", lambda: tensors):
                pass
            with self._exchanging("the parameters"), torch.no_grad():
                for tensor in tensors:
                    values = tensor.contiguous()
                    dist.broadcast(values, group=self.group, group_src=0)
                    tensor.copy_(values)

    def __deepcopy__(self, memo: Any) -> Replicas:
        return self  # A group of processes cannot be copied, and a copy of the pipeline has the same replicas.

    @contextmanager
    def together(self, what: str, exchanged: Callable[[], Sequence[Tensor]] = tuple) -> Iterator[None]:
        """Run a ``with`` block in all replicas, and raise an error in all of them if one fails.

        Args:
            what: names the block, for errors
            exchanged: gives the tensors whose values the replicas exchange behind the block

        Raises:
            RuntimeError: the block has failed in another replica, which does not go on either.
            ValueError: the replicas would exchange different tensors, at which processes hang or are killed.
        """
        if self.group is None:
            yield
            return
        try:
            yield
            # The hash of integers is the same in all processes.
            tensors = exchanged()
            places = list(dict.fromkeys([tensor.device for tensor in tensors]))
            rows = [(*tensor.shape, tensor.element_size(), places.index(tensor.device)) for tensor in tensors]
            layout = hash(tuple(rows))
        except Exception:
            self._largest([1, 0, 0], what)
            raise
        failed, highest, lowest = self._largest([0, layout, ~layout], what)
        if failed:
            raise RuntimeError(f"{what} failed in another replica, which raises the error; .grad is as it was before")
        if highest != ~lowest:
            raise ValueError(
                "replicas must have the same layers, as many of them on each device, and the same frozen parameters, "
                "and must all run with gradients or all without, but they differ; make them alike in every process"
            )

    def _largest(self, numbers: list[int], what: str) -> list[int]:
        """Return the largest values of all replicas."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        with self._exchanging(f"the end of {what}"):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group)
        return tensor.tolist()

    def total(self, weight: float) -> float:
        """Return the sum of the weights of all replicas."""
        if self.group is None:
            return weight
        weights = torch.tensor([weight], dtype=torch.float64, device=self._device)
        self.add(weights, "the weight of the targets")
        return float(weights)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all replicas."""
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        self.add(tensor, "the weight of the targets")
        result: list[float] = tensor.tolist()
        return result

    def add(self, tensor: Tensor, what: str) -> None:
        """Add to ``tensor`` its values in all other replicas."""
        if self.group is not None:
            with self._exchanging(what):
                dist.all_reduce(tensor, group=self.group)

    def add_gradients(self, parameters: Sequence[Tensor], grads: list[Leaf]) -> list[Leaf]:
        """Return the sums of the gradients of all replicas; see `add_gradients`."""
        with self._exchanging("the gradients"):
            return add_gradients(parameters, grads, self.group, self._device)

    @contextmanager
    def _exchanging(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
            raise RuntimeError(
                f"replica {rank} of {size} has waited for {what} of the others, in vain: {error}; "
                "read the errors of the others, and start all of them again from the last checkpoint"
            ) from error


class MeshReplicas(Replicas):
    """The replicas of a pipeline over processes.

    They do not agree on the end of each phase: a process that fails closes its connections, so that none waits for it.

    Args:
        processes: the processes
        device: where numbers are exchanged
    """

    def __init__(self, processes: Processes, device: torch.device) -> None:
        super().__init__(processes.replica_group, device)
        self._processes = processes

    @contextmanager
    def together(self, what: str, exchanged: Callable[[], Sequence[Tensor]] = tuple) -> Iterator[None]:
        """See `Replicas.together`."""
        yield

    @contextmanager
    def _exchanging(self, what: str) -> Iterator[None]:
        with self._processes.exchanging_with_replicas(f"{what} of the replicas"):
            yield


def add_gradients(parameters: Sequence[Tensor], grads: list[Leaf], group: Any, device: torch.device) -> list[Leaf]:
    """Return the sums of the gradients of all processes; None where none of them has a gradient.

    Args:
        parameters: the same parameters, in the same order, in all processes
        grads: the gradients of the parameters in this process; the list is emptied bucket by bucket, to free memory
        group: the processes
        device: where numbers are exchanged

    Raises:
        ValueError: a gradient is sparse, in any of the processes.
        RuntimeError: another process does not answer.
    """
    layouts = [[grad is not None, grad is not None and grad.layout is not torch.strided] for grad in grads]
    # Added up before anything is refused, so that all processes raise the error, and none waits for another.
    used, sparse = _added(torch.tensor(layouts, dtype=torch.int32, device=device), group)
    if any(sparse):
        raise ValueError("sparse gradients cannot be added up over replicas; make the layers without sparse=True")
    sums: list[Leaf] = [None] * len(parameters)
    for bucket in _buckets(parameters, [index for index, count in enumerate(used) if count]):
        flat = torch.cat([_flat(parameters[index], grads[index]) for index in bucket])
        for index in bucket:
            grads[index] = None
        dist.all_reduce(flat, group=group)
        for index, part in zip(bucket, torch.split(flat, [parameters[index].numel() for index in bucket])):
            parameter = parameters[index].detach()
            sums[index] = torch.empty_like(parameter).copy_(part.view_as(parameter))
    return sums


def _buckets(parameters: Sequence[Tensor], indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of parameters of one device and one dtype, ``_BUCKET`` bytes at a time or a little more."""
    kinds: dict[Any, list[int]] = {}
    for index in indices:
        kinds.setdefault((parameters[index].device, parameters[index].dtype), []).append(index)
    for kind in kinds.values():
        bucket, size = [], 0
        for index in kind:
            bucket.append(index)
            size += parameters[index].nbytes
            if size >= _BUCKET or index == kind[-1]:
                yield bucket
                bucket, size = [], 0


def _flat(parameter: Tensor, grad: Leaf) -> Tensor:
    return (torch.zeros_like(parameter) if grad is None else grad).flatten()


def _added(numbers: Tensor, group: Any) -> tuple[list[int], list[int]]:
    """Return the sums of the two columns of all processes."""
    dist.all_reduce(numbers, group=group)
    used, sparse = numbers.view(-1, 2).T.tolist()
    return used, sparse
