"""The processes of a pipeline: they agree on each step, exchange values, and name each other in errors.

A process that cannot prepare a step, or prepares another one than the others, must not begin to send: its neighbours
would wait for ever, or receive tensors of the wrong shapes. So all processes agree before the first tensor is sent. A
process that fails later closes its connections, by which those that wait for it wake up at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.devices.torch_internals import default_store, named_group, timeout_of
from torchgpipe.processes.messages import Messages
from torchgpipe.processes.stand_in import StandIn
from torchgpipe.processes.tags import NUMBERS, PROOF, tag_of
from torchgpipe.processes.wire import in_two, pack, size_of_rest, unpack

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["OthersFail", "Processes"]

K = TypeVar("K")
V = TypeVar("V")

#: How long a process waits in the store before it looks whether others have failed.
_LOOK = timedelta(seconds=2)

#: How many groups this process has made of each group of a mesh.
_counts: Counter[str] = Counter()


def _next_name(group: Any) -> str:
    """Return a name for a new group beside one of a mesh, whose processes all make their pipelines in the same order.

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
        # Groups of their own: closing them tells the others of a failure, and they are not in anybody's way.
        self._prefix = _next_name(of_stages)
        self._group = named_group(of_stages, self._prefix, timeout, "gloo")
        self.replica_group: Any = None
        if mesh.ndim == 2:  # For gradients on their devices, and for numbers of the host.
            both = "cpu:gloo,cuda:nccl" if "nccl" in dist.get_backend() else "gloo"
            of_replicas = mesh.get_group(0)
            self.replica_group = named_group(of_replicas, _next_name(of_replicas), timeout, both)
        self.replica = 0 if self.replica_group is None else dist.get_rank(self.replica_group)
        self._part, self._phase, self._timeout = part, "", timeout
        #: The error after which the connections were closed.
        self._closed = ""
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self.messages = Messages(self._group)
        self.owners: Sequence[int] = []
        self.step = 0
        self._store = default_store()

    def __deepcopy__(self, memo: Any) -> Processes:
        return self  # A group of processes cannot be copied, and a copy of the model has the same.

    def __reduce__(self) -> Any:
        raise TypeError("a model over several processes cannot be pickled; save its state_dict()")

    @property
    def place(self) -> str:
        """The rank and the columns of this process, as text."""
        mine = ", ".join([str(j) for j in range(len(self.owners)) if self.is_mine(j)])
        place = f"rank {dist.get_rank()}, {self._part} {mine} of {len(self.owners)}"
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
            own: what to tell the others, such as a seed; see `pack`
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
            value: what this process gives; see `pack`
            what: names it, for errors
            fault: what has kept this process from giving anything; see `all_together`

        Raises:
            OthersFail: another process has a fault, and this one has none.
        """
        first, rest = in_two([None if fault is None else f"{type(fault).__name__}: {fault}"[:500], value])
        with self.exchanging(what):
            rows = self._gathered(first)
            longest = max(map(size_of_rest, rows))
            rests = self._gathered(torch.cat([rest, rest.new_empty(longest - len(rest))])) if longest else rows
            told = [unpack(torch.cat(parts)) for parts in zip(rows, rests)]
        for rank, (word, _) in enumerate(told) if fault is None else ():
            if word is not None:
                raise OthersFail(f"{self.place}: rank {self._ranks([rank])} has failed before {what}: {word}")
        return [given for _, given in told]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(rows, tensor, group=self._group)
        return rows

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
        """Return, in the first process, what all have, by names, see `pack`; in the others, what these have."""
        if self.rank:
            self.messages.tell(named, [0], tag_of(PROOF, 0, 0))
        for rank in self.others if self.rank == 0 else ():
            with self.exchanging(what, [rank]):
                named = self.messages.hear(rank, tag_of(PROOF, 0, 0)) | named
        return named

    def broadcast(self, tensor: Tensor, source: int, what: str) -> None:
        """Give ``tensor`` the values that it has in ``source``."""
        with self.exchanging(what):
            on_host = tensor.detach().cpu().contiguous()
            dist.broadcast(on_host, group=self._group, group_src=source)
            if self.rank != source:
                tensor.detach().copy_(on_host)

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

    def publish(self, word: str, value: Any) -> None:
        """Let other processes look up a value, see `pack`; nobody waits."""
        self._store.set(f"{self._prefix}/{word}", pack(value).numpy().tobytes())

    def withdraw(self, word: str) -> None:
        """Remove from the store what was published."""
        self._store.delete_key(f"{self._prefix}/{word}")

    def look_up(self, word: str, source: int, what: str) -> Any:
        """Return a value that ``source`` publishes, and wait for it."""
        key, end = f"{self._prefix}/{word}", time.monotonic() + self._timeout.total_seconds()
        with self.exchanging(what, [source]):
            # A connection of its own, as whoever waits in a store keeps all others from it.
            store = self._store if self._store.check([key]) else self._store.clone()
            while not store.check([key]):
                if self._failures():
                    raise RuntimeError("it has failed")
                if time.monotonic() > end:
                    raise RuntimeError(f"nothing came within {self._timeout}")
                with suppress(RuntimeError):  # Nothing has come so far.
                    store.wait([key], _LOOK)
            return unpack(store.get(key))

    def take_numbers(self, states: dict[int, Tensor], i: int, j: int) -> None:
        """Take over the states of generators behind the column before ``j``, if that is in another process.

        Args:
            states: the states that micro-batch ``i`` has left, which are changed
            i: the micro-batch
            j: the column that begins
        """
        if j and not self.is_mine(j - 1):
            with self.exchanging(f"the random state of micro-batch {i}", [self.owners[j - 1]]):
                states.update(self.messages.hear(self.owners[j - 1], tag_of(NUMBERS, i, j)))

    def leave_numbers(self, states: dict[int, Tensor], i: int, j: int) -> None:
        """Leave the states of generators behind column ``j`` to the process of the next one, if that is another."""
        if j + 1 < len(self.owners) and not self.is_mine(j + 1):
            self.messages.tell(dict(states), [self.owners[j + 1]], tag_of(NUMBERS, i, j + 1))

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
            with self._naming_peers():
                yield
            self._flush()
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

    @contextmanager
    def _naming_peers(self) -> Iterator[None]:
        """Name this process in an error of gloo that a message has raised, as when its receiver has ended."""
        try:
            yield
        except RuntimeError as error:
            if "gloo" in str(error) and "in vain" not in str(error):
                self._lost(error, "an answer to its messages", self._ranks(self.others))
            raise

    def _flush(self) -> None:
        with self.exchanging("room for what it has sent"):
            self.messages.flush()

    def fail(self, error: BaseException) -> None:
        """Close the connections, and tell the others of an error, wherever they wait for this process."""
        if self._closed:
            return
        self._closed = f"{type(error).__name__}: {error}"[:500]
        with suppress(RuntimeError):  # The store may be in a process that has ended.
            self._store.set(f"{self._prefix}/failed/{self.rank}", self._closed)
        del self.messages  # With all that was to be sent and received.
        for group in (self._group, self.replica_group):
            if group is not None:
                dist.destroy_process_group(group)
        del self._group

    @contextmanager
    def exchanging(self, what: str, peers: Sequence[int] | None = None, group: Any = None) -> Iterator[None]:
        """Name this process and its peers in errors of an exchange.

        Args:
            what: names what this process waits for
            peers: the ranks that should send it; all others if None
            group: what the ranks are in, if not the pipeline
        """
        self._verify_open()
        try:
            yield
        except RuntimeError as error:
            if hasattr(error, "__notes__"):  # It was told where this is from: of what has gone on meanwhile.
                raise
            group = group or self._group
            others = peers or [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
            self._lost(error, what, self._ranks(others, group))

    def exchanging_with_replicas(self, what: str) -> AbstractContextManager[None]:
        """See `exchanging`; the peers are the processes with the same columns in other replicas."""
        return self.exchanging(what, group=self.replica_group)

    def _lost(self, error: Exception, what: str, ranks: str) -> NoReturn:
        why = "; ".join(self._failures()) or error
        raise RuntimeError(
            f"{self.place} has waited in step {self.step} for {what} from rank {ranks}, in vain: {why}; read the error "
            "of that process, and start all of them again from the last checkpoint"
        ) from error

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

    def _ranks(self, ranks: Sequence[int], group: Any = None) -> str:
        """Return ranks of a group, of the pipeline by default, as those of all processes, as text."""
        return ", ".join([str(dist.get_global_rank(group or self._group, rank)) for rank in ranks])
