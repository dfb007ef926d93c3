"""The weights of partitions come to their devices before the actions that need them, and leave after these.

When that is, `torchgpipe.schedule.residency` derives from the actions; nothing is decided while they run. Around an
action of partition j on a device:

    before   the computation waits until the weights of j have arrived
    after    if it was the last backward of j, its gradients go down; if j is needed later than others, or not at all,
             its weights leave; where a slot has become free, the next partition comes

A weight can be read only in its own partition: elsewhere, its memory may have gone. Reading memory that has gone would
end the process, so the first mini-batch of a kind is watched, operation by operation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.interrupts import uninterrupted
from torchgpipe.devices.stream import Mark, Stream
from torchgpipe.devices.torch_internals import DispatchMode, pytree, written
from torchgpipe.listener.listener import NO_MICRO_BATCH, Heard, Kind, Listener, recorded, unheard
from torchgpipe.model.untouched import changes_no_number
from torchgpipe.offload.aliases import OffloadedAliases
from torchgpipe.schedule import Action
from torchgpipe.schedule.residency import Stay, residency

__all__ = ["OnDemand", "Residence", "watch"]


class _Stays:
    """What comes to a device, and when it leaves.

    Attributes:
        actions: the actions
        position: the number of the next action
        waiting: the stays of weights that have not begun
        first, last: the stays of weights by their first and last actions
        down: the stays of gradients by their last actions
        arrived: for each partition that has come, and not been needed yet, the mark of its upload
    """

    def __init__(self, actions: Sequence[Action], weights: Sequence[Stay], gradients: Sequence[Stay]) -> None:
        self.actions, self.position = actions, 0
        self.waiting = deque(weights)
        self.first = {stay.first: stay for stay in weights}
        self.last = {stay.last: stay for stay in weights}
        self.down = {stay.last: stay for stay in gradients}
        self.arrived: dict[int, Mark] = {}


class Residence:
    """The coming and going of weights during actions, in the workers that run these.

    Args:
        aliases: the aliases of the parameters
        streams: where each column computes
        actions: the actions, in an order in which those of each device run
        partitions: for each column, its partition: columns of one partition come together
        listener: the listener of the mini-batch, if there is one
        watches: whether to look at each operation
    """

    def __init__(
        self,
        aliases: OffloadedAliases,
        streams: Sequence[Stream],
        actions: Sequence[Action],
        partitions: Sequence[int],
        listener: Listener | None,
        *,
        watches: bool,
    ) -> None:
        self._aliases, self._memory, self._streams, self._partitions = aliases, aliases.host_memory, streams, partitions
        self._watches, self._listener = watches, listener
        self._columns: dict[int, list[int]] = {}
        for j, partition in enumerate(partitions):
            self._columns.setdefault(partition, []).append(j)
        by_device: dict[torch.device, list[Action]] = {}
        for action in actions:
            by_device.setdefault(streams[action.j].device, []).append(action)
        program = [[Action(kind, i, partitions[j]) for kind, i, j in row] for row in by_device.values()]
        stays = residency(program, self._memory.slots)
        self._on = {
            device: _Stays(row, weights, gradients)
            for (device, row), weights, gradients in zip(by_device.items(), stays.weights, stays.gradients)
        }
        self._resting = aliases.resting
        if self._resting is not None:
            self._resting.begin(actions, streams, partitions, listener)

    def before(self, action: Action) -> None:
        """Let the computation wait for the weights that an action needs."""
        computing = self._streams[action.j]
        stays = self._on[computing.device]
        if stays.position == 0:
            self._upload(stays, -1)
            self._prefetch(stays, 0)
            self._prefetch(stays, 1)
        stay = stays.first.get(stays.position)
        if stay is not None:
            computing.wait(stays.arrived.pop(stay.j))

    def after(self, action: Action) -> None:
        """Let go what is not needed any more, and let come what is needed next."""
        stays = self._on[self._streams[action.j].device]
        k, stays.position = stays.position, stays.position + 1
        stay = stays.down.get(k)
        if stay is not None:
            for j in self._columns[stay.j]:
                bring_down(self._aliases, j, self._streams[j], self._heard("download", stay.j))
        stay = stays.last.get(k)
        if stay is not None:
            self._leave(stay.j)
        self._upload(stays, k)
        if self._resting is not None:
            self._resting.settle(action, self._streams[action.j])
            self._resting.leave(self._streams[action.j])
            self._prefetch(stays, k + 2)

    def _prefetch(self, stays: _Stays, k: int) -> None:
        if self._resting is not None and k < len(stays.actions):
            self._resting.prefetch(stays.actions[k])

    def watching(self, j: int) -> AbstractContextManager[object]:
        """Look at each operation in a ``with`` block, if this mini-batch is watched."""
        return watch(self._aliases, lambda: j) if self._watches else nullcontext()

    def end(self) -> None:
        """Take all weights from the devices, and wait for all copies: the caller may change what is in host memory."""
        errors: list[Exception] = []

        def work() -> None:
            try:
                for j, stream in enumerate(self._streams):
                    leave(self._aliases, j, stream)
                for device in self._on:
                    self._memory.up(device).synchronize()
                    self._memory.down(device).synchronize()
                if self._resting is not None:
                    self._resting.end()
            except Exception as error:  # A device that has failed fails again.
                errors.append(error)

        uninterrupted(work)
        if errors:
            try:
                raise errors.pop()
            finally:
                del errors

    def _upload(self, stays: _Stays, k: int) -> None:
        """Begin the uploads that have room after action ``k``."""
        while stays.waiting and stays.waiting[0].after <= k:
            partition = stays.waiting.popleft().j
            columns = self._columns[partition]
            device = self._streams[columns[0]].device
            stays.arrived[partition] = come(self._aliases, columns, device, self._heard("upload", partition))

    def _heard(self, kind: Kind, partition: int) -> Heard:
        return partial(recorded, self._listener, kind, NO_MICRO_BATCH, partition, None)

    def _leave(self, partition: int) -> None:
        # Autocast would keep the casts of weights. It may drop those of other partitions, too, and casts these again.
        torch.clear_autocast_cache()
        for j in self._columns[partition]:
            self._aliases.verify_untouched(j)
            leave(self._aliases, j, self._streams[j])


def come(aliases: OffloadedAliases, columns: Sequence[int], device: torch.device, heard: Heard = unheard) -> Mark:
    """Begin the upload of the weights of a partition, and return the mark of its end."""
    memory = aliases.host_memory
    up = memory.up(device)
    with up.use(), heard(up):
        for j in columns:
            aliases.fill(j)
        memory.came()
        return up.mark()


def leave(aliases: OffloadedAliases, j: int, computing: Stream) -> None:
    """Take the weights of column ``j`` from its device, when the computation is through with them."""
    memory = aliases.host_memory
    up = memory.up(computing.device)
    up.wait(computing.mark())
    with up.use():
        memory.went(computing.device, aliases.empty(j))


def bring_down(aliases: OffloadedAliases, j: int, computing: Stream, heard: Heard = unheard) -> None:
    """Begin the download of the gradients of column ``j``."""
    memory = aliases.host_memory
    down = memory.down(computing.device)
    down.wait(computing.mark())
    with down.use(), heard(down):
        aliases.bring_down(j, down)


def _tensors(*values: Any) -> Iterator[Tensor]:
    for value in pytree.tree_leaves(values):
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield value


class _Here(threading.local):
    present: Callable[[], int] | None = None


#: The column that this thread computes in.
_here = _Here()


@contextmanager
def watch(aliases: OffloadedAliases, present: Callable[[], int]) -> Iterator[None]:
    """Refuse operations on weights of other partitions, and those that change weights, in a ``with`` block.

    Args:
        aliases: the aliases of the parameters
        present: returns the column that this thread computes in
    """
    outer, _here.present = _here.present, present
    try:
        with _WatchedWeights(aliases):
            yield
    finally:
        _here.present = outer


class _WatchedWeights(DispatchMode):
    """See `watch`. A recomputation takes this mode along, perhaps into another thread, where it is another column's."""

    def __init__(self, aliases: OffloadedAliases) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._aliases = aliases

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _here.present is not None:
            for tensor in _tensors(args, kwargs):
                self._aliases.verify_present(tensor, _here.present(), f"'{func}'")
            for tensor in _tensors(written(func, args, kwargs)):
                # A trained weight may be another one at the next call, and be changed then.
                if self._aliases.is_frozen(tensor) and changes_no_number(func, args, kwargs):
                    continue
                self._aliases.refuse_changed(tensor)
        return func(*args, **kwargs)


class OnDemand(DispatchMode):
    """Lets weights come when an operation needs them, in a ``with`` block; those that were used last stay.

    For a run without a program, forward and backward: one piece after the other, in the order of the model.

    Args:
        aliases: the aliases of the parameters
        streams: where each column computes
    """

    def __init__(self, aliases: OffloadedAliases, streams: Sequence[Stream]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._aliases, self._streams, self._memory = aliases, streams, aliases.host_memory
        #: The columns whose weights are there, the one that was used last behind the others.
        self._there: list[int] = []
        self._lock = threading.Lock()  # Backward runs in a thread for each device.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [self._aliases.column_of(tensor) for tensor in _tensors(args, kwargs)]
        columns = {column for column in used if column is not None}
        if columns:
            with self._lock:
                for j in sorted(columns):
                    self._need(j, columns)
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        for j in self._there:
            self._end(j)
        self._there = []
        for device in {stream.device for stream in self._streams}:
            self._memory.up(device).synchronize()
            self._memory.down(device).synchronize()

    def _need(self, j: int, needed: set[int]) -> None:
        if j in self._there:
            self._there.remove(j)
            self._there.append(j)
            return
        device = self._streams[j].device
        present = [k for k in self._there if self._streams[k].device == device]
        for k in [k for k in present if k not in needed][: max(0, len(present) + 1 - self._memory.slots)]:
            self._end(k)
            self._there.remove(k)
        # In the thread and on the stream of the operation.
        self._memory.streams.current(device).wait(come(self._aliases, [j], device))
        self._there.append(j)

    def _end(self, j: int) -> None:
        computing = self._memory.streams.current(self._streams[j].device)
        torch.clear_autocast_cache()
        bring_down(self._aliases, j, computing)
        leave(self._aliases, j, computing)
