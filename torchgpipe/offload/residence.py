"""Residence: which tensors of a mini-batch are on their devices while its actions run.

Without offload all of them are, from first to last: `Residence`. With offload, `HostResidence` uploads the weights of a
partition before the actions that need them, and evicts them afterwards. When that is, `torchgpipe.schedule.residency`
derives from the actions; nothing is decided while they run. Around an action of partition j on a device:

    before   the computation waits until the weights of j have arrived
    after    if it was the last backward of j, its gradients are downloaded; if j is needed later than others, or not at
             all, its weights are evicted; where a slot has become free, the next partition is uploaded

A weight can be read only in its own partition: elsewhere, it may have been evicted. Reading evicted memory would end
the process, so the first mini-batch of a kind is watched, operation by operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchgpipe.devices.interrupts import uninterrupted
from torchgpipe.devices.stream import Mark, Stream
from torchgpipe.devices.torch_internals import DispatchMode, pytree, written
from torchgpipe.devices.typing import Leaf
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.listener.listener import NO_MICRO_BATCH, Heard, Kind, Listener, recorded
from torchgpipe.model.untouched import changes_no_number
from torchgpipe.offload.aliases import OffloadedAliases
from torchgpipe.offload.host_copies import Half, HostCopies, HostCopy
from torchgpipe.schedule import Action
from torchgpipe.schedule.residency import residency

__all__ = ["RESIDENT", "Residence", "on_demand", "residence_of"]

L = TypeVar("L", bound=Leaf)

_nothing = nullcontext()


class Residence:
    """The residence of a mini-batch without offload: all stays on the devices, so nothing is to be done.

    Attributes:
        has_copies: whether there may be host copies
    """

    has_copies = False

    def begin(self, actions: Sequence[Action]) -> None:
        """Begin to run actions, which are in an order in which those of each device run."""

    def before(self, action: Action) -> None:
        """Let the computation wait for the weights that an action needs."""

    def after(self, action: Action) -> None:
        """Evict what is not needed any more, and begin the uploads of what is needed next."""

    def end(self) -> None:
        """Evict all weights, and wait for all transfers: the caller may change what is in host memory."""

    def watched(self, column: Callable[[], int]) -> AbstractContextManager[object]:
        """Verify each operation on weights in a ``with`` block, if this mini-batch is watched.

        Args:
            column: returns the column that this thread computes in
        """
        return _nothing

    def keep(self, tensor: L, now: Half, until: Half) -> L | HostCopy:
        """Return what is kept of a tensor; see `HostCopies.keep`."""
        return tensor

    def evicted(self, tensors: Iterable[Tensor], now: Half, until: Half) -> AbstractContextManager[object]:
        """Evict tensors that the caller holds in a ``with`` block; see `HostCopies.evicted`."""
        return _nothing


#: It has no state.
RESIDENT = Residence()


class HostResidence(Residence):
    """The residence of a mini-batch whose weights live in host memory.

    Args:
        aliases: the aliases of the parameters
        streams: where each column computes
        partitions: for each column, its partition: columns of one partition are uploaded together
        listener: the listener of the mini-batch, if there is one
        watches: whether to verify each operation
    """

    has_copies = True

    def __init__(
        self,
        aliases: OffloadedAliases,
        streams: Sequence[Stream],
        partitions: Sequence[int],
        listener: Listener | None,
        *,
        watches: bool,
    ) -> None:
        self._aliases, self._streams, self._partitions = aliases, streams, partitions
        self._listener, self._watches = listener, watches
        self._columns: dict[int, list[int]] = {}
        for j, partition in enumerate(partitions):
            self._columns.setdefault(partition, []).append(j)
        self._copies = HostCopies(aliases, streams, partitions, listener)
        #: For each partition that was uploaded, and not been needed yet, the mark of its upload.
        self._arrived: dict[int, Mark] = {}
        #: What is done before an action, and after it.
        self._before: dict[Action, list[Callable[[], None]]] = {}
        self._after: dict[Action, list[Callable[[], None]]] = {}

    def begin(self, actions: Sequence[Action]) -> None:
        by_device: dict[torch.device, list[Action]] = {}
        for action in actions:
            by_device.setdefault(self._streams[action.j].device, []).append(action)
        program = [[Action(kind, i, self._partitions[j]) for kind, i, j in row] for row in by_device.values()]
        stays = residency(program, [self._aliases.host_memory.slots[device] for device in by_device])
        self._copies.begin(actions)
        for row, weights, gradients in zip(by_device.values(), stays.weights, stays.gradients):
            before, after = ([list[Callable[[], None]]() for _ in row] for _ in range(2))
            for stay in gradients:
                after[stay.last].append(partial(self._download, stay.j))
            for stay in weights:
                after[stay.last].append(partial(self._evict, stay.j))
            for stay in weights:
                (before[0] if stay.after < 0 else after[stay.after]).append(partial(self._upload, stay.j))
            for k, action in enumerate(row):
                after[k].append(partial(self._copies.end_of, action, self._streams[action.j]))
                (before[0] if k < 2 else after[k - 2]).append(partial(self._copies.prefetch, action))
            for stay in weights:
                before[stay.first].append(partial(self._wait_for, stay.j))
            self._before.update(zip(row, before))
            self._after.update(zip(row, after))

    def before(self, action: Action) -> None:
        for run in self._before[action]:
            run()

    def after(self, action: Action) -> None:
        for run in self._after[action]:
            run()

    def _upload(self, partition: int) -> None:
        self._arrived[partition] = self._aliases.upload(self._columns[partition], self._heard("upload", partition))

    def _wait_for(self, partition: int) -> None:
        self._streams[self._columns[partition][0]].wait(self._arrived.pop(partition))

    def _download(self, partition: int) -> None:
        for j in self._columns[partition]:
            self._aliases.download(j, self._streams[j], self._heard("download", partition))

    def _evict(self, partition: int) -> None:
        # Autocast would keep the casts of weights. It drops those of other partitions, too, and casts these again.
        torch.clear_autocast_cache()
        for j in self._columns[partition]:
            self._aliases.verify_untouched(j)
            self._aliases.evict(j, self._streams[j])

    def _heard(self, kind: Kind, partition: int) -> Heard:
        return partial(recorded, self._listener, kind, NO_MICRO_BATCH, partition, None)

    def keep(self, tensor: L, now: Half, until: Half) -> L | HostCopy:
        return self._copies.keep(tensor, now, until)

    def evicted(self, tensors: Iterable[Tensor], now: Half, until: Half) -> AbstractContextManager[object]:
        return self._copies.evicted(tensors, now, until)

    def watched(self, column: Callable[[], int]) -> AbstractContextManager[object]:
        return _watched(self._aliases, column) if self._watches else _nothing

    def end(self) -> None:
        uninterrupted(self._end)

    def _end(self) -> None:
        for j, stream in enumerate(self._streams):
            self._aliases.evict(j, stream)
        for device in {stream.device for stream in self._streams}:
            self._aliases.host_memory.synchronize(device)
        self._copies.end()
        # They lead back to this object.
        self._before, self._after = {}, {}


def residence_of(
    aliases: Aliases, streams: Sequence[Stream], partitions: Sequence[int], listener: Listener | None, *, watches: bool
) -> Residence:
    """Return the residence of a mini-batch with these aliases; see `HostResidence`."""
    if isinstance(aliases, OffloadedAliases):
        return HostResidence(aliases, streams, partitions, listener, watches=watches)
    return RESIDENT


def _tensors(*values: Any) -> Iterator[Tensor]:
    for value in pytree.tree_leaves(values):
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield value


class _Here(threading.local):
    column: Callable[[], int] | None = None


#: The column that this thread computes in.
_here = _Here()


@contextmanager
def _watched(aliases: OffloadedAliases, column: Callable[[], int]) -> Iterator[None]:
    """Refuse operations on weights of other partitions, and those that change weights, in a ``with`` block."""
    outer, _here.column = _here.column, column
    try:
        with _Watch(aliases):
            yield
    finally:
        _here.column = outer


class _Watch(DispatchMode):
    """See `_watched`. A recomputation enters this mode, too, perhaps in another thread, with another column."""

    def __init__(self, aliases: OffloadedAliases) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._aliases = aliases

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _here.column is not None:
            for tensor in _tensors(args, kwargs):
                self._aliases.verify_present(tensor, _here.column(), f"'{func}'")
            for tensor in _tensors(written(func, args, kwargs)):
                # A trained weight may be another one at the next call, and be changed then.
                if self._aliases.is_frozen(tensor) and changes_no_number(func, args, kwargs):
                    continue
                self._aliases.refuse_changed(tensor)
        return func(*args, **kwargs)


def on_demand(aliases: Aliases, streams: Sequence[Stream]) -> AbstractContextManager[object]:
    """Upload weights when an operation needs them in a ``with`` block, if they live in host memory.

    For a run without a program, forward and backward: one piece after the other, in the order of the model.

    Args:
        aliases: the aliases of the parameters
        streams: where each column computes
    """
    return _OnDemand(aliases, streams) if isinstance(aliases, OffloadedAliases) else _nothing


class _OnDemand(DispatchMode):
    """See `on_demand`. The weights that were used last stay resident."""

    def __init__(self, aliases: OffloadedAliases, streams: Sequence[Stream]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._aliases, self._streams, self._memory = aliases, streams, aliases.host_memory
        #: The columns that are resident, the one that was used last behind the others.
        self._resident: list[int] = []
        self._lock = threading.Lock()  # Backward runs in a thread for each device.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        columns = {j for one in _tensors(args, kwargs) if (j := self._aliases.column_of(one)) is not None}
        with self._lock if columns else _nothing:
            for j in sorted(columns):
                self._need(j, columns)
            return func(*args, **kwargs)

    def __enter__(self) -> Any:
        # The cache of casts would keep what is evicted, and cannot be cleared here: a cast holds its lock.
        self._caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        torch.set_autocast_cache_enabled(self._caches)
        for j in self._resident:
            self._evict(j)
        self._resident = []
        for device in {stream.device for stream in self._streams}:
            self._memory.synchronize(device)

    def _need(self, j: int, needed: set[int]) -> None:
        if j in self._resident:
            self._resident.remove(j)
            self._resident.append(j)
            return
        device = self._streams[j].device
        present = [k for k in self._resident if self._streams[k].device == device]
        for k in [k for k in present if k not in needed][: max(0, len(present) + 1 - self._memory.slots[device])]:
            self._evict(k)
            self._resident.remove(k)
        # In the thread and on the stream of the operation.
        self._memory.streams.current(device).wait(self._aliases.upload([j]))
        self._resident.append(j)

    def _evict(self, j: int) -> None:
        computing = self._memory.streams.current(self._streams[j].device)
        self._aliases.download(j, computing)
        self._aliases.evict(j, computing)
