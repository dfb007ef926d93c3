"""The processes of a pipeline: they agree on each step, exchange values, and name each other in errors.

A process that cannot prepare a step, or prepares another one than the others, must not begin to send: its neighbours
would wait for ever, or receive tensors of the wrong shapes. So all processes agree before the first tensor is sent. A
process that fails later closes its connections, by which those that wait for it wake up at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.devices.torch_internals import default_store, named_group, timeout_of
from torchgpipe.processes.messages import Messages
from torchgpipe.processes.stand_in import StandIn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["OthersFail", "Processes"]

K = TypeVar("K")
V = TypeVar("V")

#: How many pipelines and groups this process has made of each group of a mesh.
_counts: Counter[str] = Counter()


def _next_name(group: Any) -> str:
    """Return a name for a new one of a group of a mesh, whose processes all make their pipelines in the same order.

    Other processes may make others meanwhile, as those of another slice of the mesh.
    """
    _counts[group.group_name] += 1
    return f"torchgpipe/{group.group_name}/{_counts[group.group_name]}"


class OthersFail(RuntimeError):
    """Another process has failed, and all others know it."""


class Processes:
    """The processes of this pipeline, and the processes with the same columns in its replicas.

    Args:
        mesh: (stages,) or (replicas, stages)
        timeout: how long a process waits for another; None for as long as the groups of ``mesh``
        part: the word for what a process has, in errors

    Attributes:
        replica_group: the processes with the same columns in all replicas; None if there are no others
        replica: the index of this process's pipeline among its replicas
        rank: the rank of this process in the pipeline
        size: the number of processes of the pipeline
        owners: the rank of each column; set by whoever arranges the columns
        step: the number of the current step
        messages: the messages of this step

    Raises:
        ValueError: the mesh has another number of dimensions.
        RuntimeError: there is no process group.
    """

    def __init__(self, mesh: DeviceMesh, timeout: timedelta | None = None, part: str = "partition") -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(f"mesh must have the dimensions (stages,) or (replicas, stages), but has {mesh.ndim}")
        of_stages = mesh.get_group(mesh.ndim - 1)
        timeout = timeout or timeout_of(of_stages)
        self._prefix = _next_name(of_stages)
        self.replica_group: Any = None
        if mesh.ndim == 2:  # For gradients on their devices, and for numbers of the host.
            both = "cpu:gloo,cuda:nccl" if "nccl" in dist.get_backend() else "gloo"
            of_replicas = mesh.get_group(0)
            self.replica_group = named_group(of_replicas, _next_name(of_replicas), timeout, both)
        self.replica = 0 if self.replica_group is None else dist.get_rank(self.replica_group)
        self._part, self._phase = part, ""
        #: The error after which the connections were closed.
        self._closed = ""
        self.rank, self.size = dist.get_rank(of_stages), dist.get_world_size(of_stages)
        self._all = dist.get_process_group_ranks(of_stages)
        self._store = default_store()
        # Connections of its own: closing them tells the others of a failure, and they are not in anybody's way.
        self.messages = Messages(self._store, self._prefix, self.rank, self.size, timeout)
        self.owners: Sequence[int] = []
        self.step = 0

    def __deepcopy__(self, memo: Any) -> Processes:
        return self  # A group of processes cannot be copied, and a copy of the model has the same.

    def __reduce__(self) -> Any:
        raise TypeError("a model over several processes cannot be pickled; save its state_dict()")

    @property
    def place(self) -> str:
        """The rank and the columns of this process, as text."""
        mine = ", ".join([str(j) for j in range(len(self.owners)) if self.is_mine(j)])
        place = f"rank {self._all[self.rank]}, {self._part} {mine} of {len(self.owners)}"
        return place if self.replica_group is None else f"{place} in replica {self.replica}"

    def is_mine(self, j: int) -> bool:
        """Return whether column ``j`` is in this process."""
        return self.owners[j] == self.rank

    @property
    def last(self) -> int:
        """The rank of the last column."""
        return self.owners[-1]

    @property
    def others(self) -> list[int]:
        """The ranks of the others."""
        return [rank for rank in range(self.size) if rank != self.rank]

    # --------------------------------------------------------------------------------------------------- before a step

    def agree(self, parts: Mapping[str, Any], own: Any, *, failed: bool = False) -> list[Any]:
        """Wait until all processes are ready for the same step.

        Args:
            parts: what must be equal in all processes, by what the error says of the others where it is not
            own: what to tell the others, such as a seed
            failed: whether this process could not prepare the step. The caller raises the error that says why.

        Returns:
            what all processes tell, by rank

        Raises:
            RuntimeError: another process has failed, prepares another step, has ended, or does not answer.
        """
        self._verify_open()
        self.step += 1
        self._phase = "has agreed"
        mine = [*parts.values()]
        rows = self.gather([failed, mine, own], "whether all are ready")
        refused = [rank for rank, row in enumerate(rows) if row[0]]
        others = [rank for rank, row in enumerate(rows) if not row[0] and row[1] != mine]
        faults = torch.tensor(len(refused) + len(others))
        self.add_replicas(faults, "whether all replicas are ready")
        if failed or not faults:
            self._phase = "has failed" if failed else "runs"
            return [row[2] for row in rows]
        if refused:
            raise RuntimeError(
                f"rank {self._ranks(refused)} could not prepare the step, and says why; nothing was sent"
            )
        if others:
            differing = [what for what, theirs, ours in zip(parts, rows[others[0]][1], mine) if theirs != ours]
            raise RuntimeError(
                f"rank {self._ranks(others)} prepares another step: it has {'; '.join(differing)}. Nothing was sent"
            )
        raise RuntimeError("another replica could not prepare the step, and says why; nothing was sent")

    # -------------------------------------------------------------------------------------------- all processes at once

    def verify_alike(self, given: Mapping[str, Any], where: str = "the comparison of what all are given") -> None:
        """Verify that all processes are given the same; ``where`` names the place, see `gather`.

        Raises:
            ValueError: another process is given something else; the error names it.
        """
        for rank, other in enumerate(self.gather(dict(given), where)):
            for name in given:
                if other[name] != given[name]:
                    raise ValueError(
                        f"{self.place}: rank {self._ranks([rank])} has another {name} than this process, "
                        f"{other[name]!r} and here {given[name]!r}: give the same in all processes"
                    )

    def gather(self, value: Any, what: str, fault: BaseException | None = None) -> list[Any]:
        """Return what all processes give, by rank.

        Args:
            value: what this process gives
            what: names it, for errors
            fault: what has kept this process from giving anything; see `all_together`

        Raises:
            OthersFail: another process has a fault, and this one has none.
        """
        word = None if fault is None else f"{type(fault).__name__}: {fault}"[:500]
        self.send([word, value], range(self.size), "gathered")
        told = [self.receive(rank, "gathered", what) for rank in range(self.size)]
        for rank, (word, _) in enumerate(told) if fault is None else ():
            if word is not None:
                raise OthersFail(f"{self.place}: rank {self._ranks([rank])} has failed before {what}: {word}")
        return [given for _, given in told]

    @contextmanager
    def all_together(self, what: str) -> Iterator[None]:
        """Surround what all processes do alike: if it fails in one of them, it fails in all.

        Whoever fails tells it the others when they gather something next, which ends the block in all of them.

        Args:
            what: names the end of it

        Raises:
            OthersFail: another process has failed.
        """
        try:
            yield
        except OthersFail:
            raise
        except Exception as fault:
            with suppress(RuntimeError):  # The connections may be what has failed.
                self.gather(None, what, fault)
            raise
        except BaseException as error:
            self.fail(error)
            raise
        self.gather(None, what)

    def collect(self, named: dict[K, V], what: str) -> dict[K, V]:
        """Return, in the first process, what all have, by names; in the others, what these have."""
        if self.rank:
            self.send(named, [0], "collected")
        for rank in self.others if self.rank == 0 else ():
            named = self.receive(rank, "collected", what) | named
        return named

    def add_replicas(self, tensor: Tensor, what: str) -> None:
        """Add to ``tensor`` its values in all other replicas."""
        if self.replica_group is not None:
            with self.exchanging_with_replicas(what):
                dist.all_reduce(tensor, group=self.replica_group)

    @torch.no_grad()
    def begin_equal(self, tensors: Sequence[Tensor]) -> None:
        """Give tensors of this process the values that they have in the first replica."""
        own = [tensor for tensor in dict.fromkeys(tensors) if not isinstance(tensor, StandIn) and not tensor.is_meta]
        for tensor in own if self.replica_group is not None else ():
            with self.exchanging_with_replicas("the parameters of the first replica"):
                values = tensor.detach().contiguous()
                dist.broadcast(values, group=self.replica_group, group_src=0)
                tensor.detach().copy_(values)

    # --------------------------------------------------------------------------------------------------------- messages

    def send(self, value: Any, to: Sequence[int], key: str, what: str = "") -> None:
        """See `Messages.send`."""
        self._verify_open()
        self.messages.send(value, to, key, what)

    def receive(self, source: int, key: str, what: str, **how: Any) -> Any:
        """See `Messages.receive`; ``what`` names what is received in the error if it does not come."""
        self._verify_open()
        try:
            return self.messages.receive(source, key, **how)
        except ConnectionError as error:
            self._lost(error, what, self._ranks([source]))

    # --------------------------------------------------------------------------------------------------------- failures

    @contextmanager
    def at_step(self) -> Iterator[None]:
        """Surround a step: its preparation, on which all agree, and what follows.

        The others are told of a failure: before all have agreed, they go on; after that, what they wait for is lost.
        """
        with self._at("prepares", ""):
            yield

    @contextmanager
    def at_backward(self) -> Iterator[None]:
        """Surround the backward of a step, to which `at_step` was around forward."""
        self._verify_open()
        with self._at("runs", ", in backward"):
            yield

    @contextmanager
    def _at(self, phase: str, where: str) -> Iterator[None]:
        """Surround what begins in a phase, and tell the others of a failure; ``where`` ends the note on the error."""
        self._phase = phase
        try:
            yield
        except BaseException as error:
            error.add_note(f"{self.place} at step {self.step}{where}")
            if self._phase == "prepares" and not self._closed:
                self.agree({}, None, failed=True)
            elif self._phase == "runs":
                self.fail(error)
            raise

    def _verify_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"{self.place} has closed its connections: {self._closed}. What was on its way is lost; start all "
                "processes again from the last checkpoint"
            )

    def fail(self, error: BaseException) -> None:
        """Close the connections, and tell the others of an error, wherever they wait for this process."""
        if self._closed:
            return
        self._closed = f"{type(error).__name__}: {error}"[:500]
        with suppress(RuntimeError):  # The store may be in a process that has ended.
            self._store.set(f"{self._prefix}/failed/{self.rank}", self._closed)
        self.messages.close()
        if self.replica_group is not None:
            dist.destroy_process_group(self.replica_group)

    @contextmanager
    def exchanging_with_replicas(self, what: str) -> Iterator[None]:
        """Name this process and those with the same columns in other replicas in errors of an exchange of ``what``."""
        self._verify_open()
        try:
            yield
        except RuntimeError as error:
            ranks = [rank for rank in dist.get_process_group_ranks(self.replica_group) if rank != self._all[self.rank]]
            self._lost(error, what, ", ".join(map(str, ranks)))

    def _lost(self, error: Exception, what: str, ranks: str) -> NoReturn:
        why = "; ".join(self._failures()) or error
        lost = RuntimeError(
            f"{self.place} has waited in step {self.step} for {what} from rank {ranks}, in vain: {why}; read the error "
            "of that process, and start all of them again from the last checkpoint"
        )
        self.fail(lost)
        raise lost from error

    def _failures(self) -> list[str]:
        """Return what other processes say of their failures."""
        try:
            return [
                f"rank {self._ranks([rank])} has failed with {self._store.get(key).decode()}"
                for rank in self.others
                if self._store.check([key := f"{self._prefix}/failed/{rank}"])
            ]
        except RuntimeError:  # The store was in a process that has ended.
            return []

    def _ranks(self, ranks: Sequence[int]) -> str:
        """Return ranks of the pipeline as those of all processes, as text."""
        return ", ".join([str(self._all[rank]) for rank in ranks])
