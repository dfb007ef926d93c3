"""Host copies: tensors that wait in host memory for their action, what cells hand to each other and what they keep.

Where all micro-batches pass a partition before the next one, a tensor may wait as many actions as there are
micro-batches, and memory of the device would bound their number. So it is downloaded while the next action runs, then
evicted, and uploaded while the last action before its own runs:

    a device     F(0,1)  F(1,1)  F(2,1)  ...  B(2,1)  B(1,1)  B(0,1)
    download             0       1       2
    upload                                            1       0

The computation waits for a download before memory is freed, and memory is allocated before an upload, both in the order
of the stream that computes. So however far the host is ahead, the device has the tensors of a few micro-batches. The
streams are not those of weights: behind a whole partition, an upload would be late.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from torchgpipe.devices.device import same_memory
from torchgpipe.devices.stream import Mark, Stream
from torchgpipe.devices.torch_internals import base_of, storage_key, versions
from torchgpipe.devices.typing import Leaf, Leaves
from torchgpipe.listener.listener import Kind, Listener, recorded
from torchgpipe.offload.aliases import OffloadedAliases
from torchgpipe.schedule import Action
from torchgpipe.schedule.action import Kind as ActionKind

__all__ = ["Half", "HostCopies", "HostCopy", "Kept", "resident", "restored"]

T = TypeVar("T")
L = TypeVar("L", bound=Leaf)

#: A cell in one of its directions: any kind of action, the micro-batch, and the column. All kinds but F are backward.
Half: TypeAlias = tuple[ActionKind, int, int]

_HOST = torch.device("cpu")


class HostCopy:
    """The copy of a tensor in host memory.

    Args:
        copies: the host copies of the mini-batch
        tensor: the tensor
        until: the half that needs the tensor next
        frees: whether `evict` frees the memory of the tensor although the caller holds it, until `restore`

    Attributes:
        device: the device of that half
    """

    def __init__(self, copies: HostCopies, tensor: Tensor, until: Half, *, frees: bool) -> None:
        self._copies, self._until, self._frees = copies, until, frees
        self.device, self._requires_grad = copies.device_of(until), tensor.requires_grad
        #: The tensor that was copied, until it is evicted.
        self._source: Tensor | None = tensor
        self._version = versions([tensor])
        #: What was uploaded, and the mark of its arrival.
        self._uploaded: Tensor | None = None
        self._arrived: Mark = None
        self.note(tensor)
        leaving = copies.stream(tensor.device, "leaving")
        leaving.wait(copies.computing(tensor.device).mark())
        with leaving.use(), copies.told("download", until, leaving):
            self._copy = torch.empty_like(tensor.detach(), device=_HOST, pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)
        if copies.cross_devices:  # The tensor may be the memory of another stream.
            leaving.record(tensor)
        self._downloaded = leaving.mark()

    def note(self, tensor: Tensor) -> None:
        """Note that a tensor has these values, which saves a second download."""
        self._noted = weakref.ref(tensor), versions([tensor])
        self._copies.by_memory[storage_key(tensor)] = self

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the elements of the one that was noted, none of them changed in place since."""
        noted, version = self._noted[0](), self._noted[1]
        return (
            noted is not None and _view(noted) == _view(tensor) and version == versions([noted]) == versions([tensor])
        )

    def evict(self, computing: Stream) -> None:
        """Free the memory of the tensor that was copied, when the download is through.

        Raises:
            RuntimeError: the tensor was changed in place meanwhile, before or after it was copied.
        """
        computing.wait(self._downloaded)
        if self._source is not None and versions([self._source]) != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._source.shape)} was changed in place after a module had got it that "
                "runs again at backward, or after its partition had passed it on, while it went to host memory; change "
                "a copy (x.clone()), leave the module out of checkpoint, or give offload='weights'"
            )
        if self._frees and self._source is not None:
            self._source.untyped_storage().resize_(0)
        self._source = None

    def restore(self, tensor: Tensor) -> None:
        """Give the tensor that was copied, and that the caller holds, its memory and values back."""
        self._frees = False
        if self._source is None:
            tensor.untyped_storage().resize_(tensor.nbytes)
            # `.data` has a version of its own, so a graph that has saved the tensor does not take this for a change.
            tensor.data.copy_(self.get())
            self.note(tensor)
        else:  # From now on the model may change it in place, so the download must be through.
            self._copies.computing(self.device).wait(self._downloaded)
            self._source = None

    def prefetch(self) -> None:
        """Begin the upload, unless it has begun, or the tensor is there."""
        if self._uploaded is None and self._resident() is None:
            computing, arriving = self._copies.computing(self.device), self._copies.stream(self.device, "arriving")
            # In the order of the computation, which frees this memory as that of any tensor.
            self._uploaded = torch.empty_like(self._copy, device=self.device)
            arriving.wait(computing.mark())
            arriving.wait(self._downloaded)
            with arriving.use(), self._copies.told("upload", self._until, arriving):
                self._uploaded.copy_(self._copy, non_blocking=True)
            self._arrived = arriving.mark()

    def discard(self) -> None:
        """Free the memory of an upload that the action has not needed, when that has arrived."""
        if self._uploaded is not None:
            self._take_upload()

    def get(self) -> Tensor:
        """Return the tensor on the device that needs it, without history, for the stream that computes there."""
        source = self._resident()
        if source is None:
            self.prefetch()
            tensor = self._take_upload()
            self.note(tensor)
        else:
            tensor = source.detach()
        return tensor.requires_grad_(self._requires_grad)

    def _take_upload(self) -> Tensor:
        tensor, arrived = self._uploaded, self._arrived
        assert tensor is not None
        self._uploaded = self._arrived = None
        self._copies.computing(self.device).wait(arrived)
        return tensor

    def _resident(self) -> Leaf:
        """Return the tensor that was copied, if it is on the device that needs it, and was not evicted."""
        source = self._source  # Another device's worker may evict it meanwhile.
        return None if source is None or source.device != self.device else source


#: What is kept of a tensor until an action: the tensor, or its host copy; `restored` and `resident` tell.
Kept: TypeAlias = Leaf | HostCopy


def restored(kept: T | HostCopy) -> T | Tensor:
    """Return a tensor, from its host copy if there is one."""
    return kept.get() if isinstance(kept, HostCopy) else kept


def resident(kept: Sequence[Kept]) -> Leaves:
    """Return the tensors among what is kept, and None in the places of host copies."""
    return tuple([None if isinstance(one, HostCopy) else one for one in kept])


class HostCopies:
    """The host copies of a mini-batch.

    Args:
        aliases: the aliases of the parameters
        streams: where each column computes
        partitions: for each column, its partition
        listener: the listener of the mini-batch, if there is one

    Attributes:
        cross_devices: whether columns are on several devices
        by_memory: the host copies by the keys of the storages of tensors that have their values
    """

    def __init__(
        self, aliases: OffloadedAliases, streams: Sequence[Stream], partitions: Sequence[int], listener: Listener | None
    ) -> None:
        self._aliases, self._memory = aliases, aliases.host_memory
        self._streams, self._partitions, self._listener = streams, partitions, listener
        devices = {stream.device for stream in streams}
        self.cross_devices = len(devices) > 1
        #: The actions between two halves from which on copies pay: the first and the last of them hide the transfers.
        self._least_wait = 4 * len(devices)
        self._numbers: dict[Half, int] = {}
        #: For each device, what was downloaded during the action before, and during the present one.
        self._downloads: dict[torch.device, list[list[HostCopy]]] = {device: [[], []] for device in devices}
        #: What each half needs. The cell that needs it holds it; a second backward needs it again.
        self._needed: dict[Half, list[weakref.ref[HostCopy]]] = {}
        #: What has been prefetched for a half, which may turn out not to need it.
        self._prefetched: dict[Half, list[HostCopy]] = {}
        self.by_memory = weakref.WeakValueDictionary[int, HostCopy]()

    def begin(self, actions: Sequence[Action]) -> None:
        """Begin to run actions, which are in the order of time."""
        self._numbers = {}
        for number, action in enumerate(actions):
            self._numbers.setdefault(_half(action), number)

    def keep(self, tensor: L, now: Half, until: Half, *, frees: bool = False) -> L | HostCopy:
        """Return the host copy of a tensor; the tensor itself if a copy does not pay.

        Args:
            tensor: the tensor
            now: the half that runs, on the device of the tensor
            until: the half that needs it next
            frees: see `HostCopy`
        """
        now, until = _half(now), _half(until)
        if tensor is None or self._numbers.get(until, 1 << 30) - self._numbers[now] < self._least_wait:
            return tensor
        if tensor.device != self.device_of(now) or not self._can_copy(tensor):
            return tensor
        # What a cell keeps for its own backward, it may have got from a host copy, and may keep several times.
        copy = self.by_memory.get(storage_key(tensor)) if now[1:] == until[1:] else None
        if copy is None or not copy.is_of(tensor):
            copy = HostCopy(self, tensor, until, frees=frees)
            self._downloads[tensor.device][-1].append(copy)
        self._needed.setdefault(until, []).append(weakref.ref(copy))
        return copy

    @contextmanager
    def evicted(self, tensors: Iterable[Tensor], now: Half, until: Half) -> Iterator[None]:
        """Evict tensors for a ``with`` block, although the caller holds them, if both halves are on one device.

        Args:
            tensors: the tensors, whose memory is that of the model's operations
            now: the half that runs
            until: the half that runs after the block
        """
        evicted: list[tuple[Tensor, HostCopy]] = []
        if self.device_of(now) == self.device_of(until):
            for tensor in {storage_key(tensor): tensor for tensor in tensors}.values():
                base = base_of(tensor)
                storage = tensor.untyped_storage()
                # Of a part, only that could be restored; memory of DLPack or a CUDA graph is not PyTorch's to free.
                is_whole = tensor.nbytes == storage.nbytes() and storage.resizable()
                if is_whole and (tensor if base is None else base).grad_fn is not None:
                    copy = self.keep(tensor, now, until, frees=True)
                    if isinstance(copy, HostCopy):
                        evicted.append((tensor, copy))
        try:
            yield
        finally:
            with self._streams[until[2]].use() if evicted else nullcontext():
                for tensor, copy in evicted:
                    copy.restore(tensor)

    def _can_copy(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        # Others would come back with other strides, and kernels may sum in another order.
        is_dense = tensor.is_contiguous() or (
            tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        return (
            is_plain
            and is_dense
            and tensor.nbytes >= self._memory.least
            and not same_memory(tensor.device, _HOST)
            and self._aliases.column_of(tensor) is None
        )

    def prefetch(self, action: Action) -> None:
        """Begin the uploads of what an action needs, on the stream that computes it, which is the current one."""
        if action.kind != "W":
            copies = self._alive(_half(action))
            self._prefetched.setdefault(_half(action), []).extend(copies)
            for copy in copies:
                copy.prefetch()

    def end_of(self, action: Action, computing: Stream) -> None:
        """Free, after an action, what was uploaded for it and not needed, and what was downloaded meanwhile."""
        for copy in self._prefetched.pop(_half(action), ()) if action.kind != "R" else ():
            copy.discard()
        self.evict(computing)

    def evict(self, computing: Stream) -> None:
        """Free the memory of what was downloaded during the action before."""
        downloads = self._downloads[computing.device]
        before = downloads.pop(0)
        downloads.append([])
        for copy in before:
            copy.evict(computing)

    def end(self) -> None:
        """Wait for all transfers, and free what is on the devices because of them."""
        for stream in self._streams:
            self.evict(stream)
            self.evict(stream)
        for device in self._downloads:
            for way in ("leaving", "arriving"):
                self.stream(device, way).synchronize()
        for half in self._needed:
            for copy in self._alive(half):
                copy.discard()
        self._prefetched.clear()

    def _alive(self, half: Half) -> list[HostCopy]:
        return [copy for ref in self._needed.get(half, ()) if (copy := ref()) is not None]

    # -------------------------------------------------------------------------------------- what one host copy asks for

    def device_of(self, half: Half) -> torch.device:
        """Return the device of a half."""
        return self._streams[half[2]].device

    def computing(self, device: torch.device) -> Stream:
        """Return the stream on which this thread computes on a device."""
        return self._memory.streams.current(device)

    def stream(self, device: torch.device, way: str) -> Stream:
        """Return the stream of a device on which activations are leaving, or arriving."""
        return self._memory.streams.side(device, f"activations {way}")

    def told(self, kind: Kind, until: Half, stream: Stream) -> AbstractContextManager[None]:
        """Tell the listener of a transfer of what ``until`` needs in a ``with`` block."""
        _, i, j = until
        return recorded(self._listener, kind, i, self._partitions[j], None, stream)


def _view(tensor: Tensor) -> tuple[object, ...]:
    """Return what tensors have in common that are the same elements of the same memory."""
    place = storage_key(tensor), tensor.storage_offset(), tensor.size(), tensor.stride()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.requires_grad


def _half(half: Half) -> Half:
    """Return the same half for all kinds of actions of one direction."""
    kind, i, j = half
    return "F" if kind == "F" else "B", i, j
