"""Tensors that wait in host memory: what cells hand to each other, and what their recomputation keeps.

Where all micro-batches pass a partition before the next one, a tensor may wait as many actions as there are
micro-batches, and memory of the device would bound their number. So it goes down while the next action runs, and comes
back while the last action before its own runs:

    a device     F(0,1)  F(1,1)  F(2,1)  ...  B(2,1)  B(1,1)  B(0,1)
    leaving              0       1       2
    arriving                                          1       0

The computation waits for a download before memory goes, and memory is taken before an upload, both in the order of the
stream that computes. So however far the host is ahead, the device has what rests of a few micro-batches. Copies have
streams apart from those of weights: behind a whole partition, they would come too late.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from torchgpipe.devices.device import same_memory
from torchgpipe.devices.stream import Mark, Stream
from torchgpipe.devices.torch_internals import versions
from torchgpipe.listener.listener import Heard, Kind, Listener, recorded
from torchgpipe.offload.host_memory import HostMemory
from torchgpipe.schedule import Action

__all__ = ["Rested", "Resting", "awake"]

T = TypeVar("T")

#: A cell in one of its directions: whether it is forward, the micro-batch, and the column.
_Half = tuple[bool, int, int]

_HOST = torch.device("cpu")


class Rested:
    """A tensor that waits in host memory, or is on its way.

    Args:
        tensor: the tensor
        memory: the source of streams
        device: where it is needed
        heard: tells the listener of the download, or of the upload
        came: whether it may have come from another device, so that its memory is that of another stream
        empties: whether somebody goes on to hold the tensor, whose memory leaves in spite of that, until `restore`

    Attributes:
        tensor: the tensor, as long as it has not left the device that it comes from
        version: the version of the tensor whose values rest
    """

    def __init__(
        self,
        tensor: Tensor,
        memory: HostMemory,
        device: torch.device,
        heard: Callable[[Kind], Heard],
        *,
        came: bool,
        empties: bool,
    ) -> None:
        self._empties, self._heard = empties, heard
        self._memory, self._device, self._requires_grad = memory, device, tensor.requires_grad
        self.tensor: Tensor | None = tensor
        (self.version,) = versions([tensor])
        #: The tensor on the device where it is needed, and the mark of its upload.
        self._there: Tensor | None = None
        self._arrived: Mark = None
        leaving = memory.side(tensor.device, "activations leaving")
        leaving.wait(memory.streams.current(tensor.device).mark())
        with leaving.use(), heard("download")(leaving):
            self._host = torch.empty_like(tensor.detach(), device=_HOST, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
        if came:
            leaving.record(tensor)
        self._down = leaving.mark()

    def leave(self, computing: Stream) -> None:
        """Give up the memory that the tensor has come from, when the download is through.

        Raises:
            RuntimeError: the tensor was changed in place meanwhile, before or after it was copied.
        """
        computing.wait(self._down)
        if self.tensor is not None and versions([self.tensor]) != [self.version]:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} was changed in place after a module had got it that "
                "runs again at backward, or after its partition had passed it on, while it went to host memory; change "
                "a copy (x.clone()), leave the module out of checkpoint, or give offload='weights'"
            )
        if self._empties and self.tensor is not None:
            self.tensor.untyped_storage().resize_(0)
        self.tensor = None

    def restore(self, tensor: Tensor) -> None:
        """Give a tensor that is all of its memory that memory back, which has left or was about to, and its values."""
        self._empties = False
        if self.tensor is None:
            tensor.untyped_storage().resize_(tensor.nbytes)
            # `.data` has a version of its own, so a graph that has saved the tensor does not take this for a change.
            tensor.data.copy_(self.get())
        else:  # From now on the model may change it in place, so the copy must be through.
            self._memory.streams.current(self._device).wait(self._down)
            self.tensor = None

    def come(self) -> None:
        """Begin the upload, unless the tensor is there, or on its way."""
        if self._there is None and not self._is_here:
            arriving = self._memory.side(self._device, "activations arriving")
            # In the order of the computation, which gives this memory up as that of any tensor.
            self._there = torch.empty_like(self._host, device=self._device)
            arriving.wait(self._memory.streams.current(self._device).mark())
            arriving.wait(self._down)
            with arriving.use(), self._heard("upload")(arriving):
                self._there.copy_(self._host, non_blocking=True)
            self._arrived = arriving.mark()

    def settle(self, computing: Stream) -> None:
        """Give up the memory of an upload that nobody has asked for, behind the copy on the stream that computes."""
        if self._there is not None:
            computing.wait(self._arrived)
            self.forget()

    def forget(self) -> None:
        """Give up the memory of an upload that nobody needs any more, when all copies are through."""
        self._there = self._arrived = None

    def get(self) -> Tensor:
        """Return the tensor where it is needed, without history, for the stream that computes there."""
        if self._is_here:
            assert self.tensor is not None
            return self.tensor.detach().requires_grad_(self._requires_grad)
        self.come()
        uploaded, arrived = self._there, self._arrived
        assert uploaded is not None
        self.forget()
        self._memory.streams.current(self._device).wait(arrived)
        return uploaded.requires_grad_(self._requires_grad)

    @property
    def _is_here(self) -> bool:
        tensor = self.tensor  # Another device's worker may take it away meanwhile.
        return tensor is not None and tensor.device == self._device


class _Leaving:
    """What is on its way on a device: of the action that runs, and of the one before."""

    def __init__(self) -> None:
        self.leaving: list[tuple[_Half, Rested]] = []
        self.left: list[tuple[_Half, Rested]] = []


class Resting:
    """What waits in host memory during a mini-batch.

    Args:
        memory: the source of streams
        stays: returns whether a tensor is to stay where it is
    """

    def __init__(self, memory: HostMemory, stays: Callable[[Tensor], bool]) -> None:
        self._memory, self._stays = memory, stays
        self._streams: Sequence[Stream] = ()
        self._numbers: dict[_Half, int] = {}
        self._devices = 1
        self._on: dict[torch.device, _Leaving] = {}
        #: What each action needs. Who needs it holds it; a second backward needs it again.
        self._needed: dict[_Half, list[weakref.ref[Rested]]] = {}
        #: What has been prefetched for an action, which may turn out not to need it.
        self._prefetched: dict[_Half, list[Rested]] = {}

    def begin(
        self,
        actions: Sequence[Action],
        streams: Sequence[Stream],
        partitions: Sequence[int],
        listener: Listener | None,
    ) -> None:
        """Begin a mini-batch, or one half of it.

        Args:
            actions: what will run, in the order of time
            streams: where each column computes
            partitions: for each column, its partition
            listener: the listener of the mini-batch, if there is one
        """
        self._streams, self._devices = streams, len({stream.device for stream in streams})
        self._partitions, self._listener = partitions, listener
        self._numbers = {}
        for number, action in enumerate(actions):
            self._numbers.setdefault(_half(action), number)
        self._on = {stream.device: _Leaving() for stream in streams}

    def rest(
        self, tensor: Tensor, now: Action, until: Action, known: Rested | None = None, *, empties: bool = False
    ) -> Tensor | Rested:
        """Let a tensor wait in host memory; or return it, if that is not worth it.

        Args:
            tensor: the tensor
            now: the action that runs, on the device of the tensor
            until: the action that needs it next
            known: where it has rested before, which saves a second download
            empties: whether to take its memory, though somebody holds it, who calls `Rested.restore`
        """
        device = self._streams[until.j].device
        wait = self._numbers.get(_half(until), 1 << 30) - self._numbers[_half(now)]
        if wait < 4 * self._devices:
            return tensor
        if known is None:
            if tensor.device != self._streams[now.j].device or not self._may_rest(tensor):
                return tensor
            key, on_its_way = _half(until), self._on[tensor.device]
            for half, rested in on_its_way.leaving:
                if half == key and rested.tensor is tensor:  # A cell keeps one tensor for several modules.
                    return rested
            heard = partial(self._heard, until)
            known = Rested(tensor, self._memory, device, heard, came=self._devices > 1, empties=empties)
            on_its_way.leaving.append((key, known))
        self._needed.setdefault(_half(until), []).append(weakref.ref(known))
        return known

    def _heard(self, until: Action, kind: Kind) -> Heard:
        return partial(recorded, self._listener, kind, until.i, self._partitions[until.j], None)

    def _may_rest(self, tensor: Tensor) -> bool:
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
            and not self._stays(tensor)
        )

    def prefetch(self, action: Action) -> None:
        """Begin the uploads of what an action needs, on the stream that computes it, which is the current one."""
        for ref in self._needed.get(_half(action), ()) if action.kind != "W" else ():
            rested = ref()
            if rested is not None:
                rested.come()
                self._prefetched.setdefault(_half(action), []).append(rested)

    def settle(self, action: Action, computing: Stream) -> None:
        """Let the computation wait for uploads that an action has not needed, before their memory is given up."""
        for rested in self._prefetched.pop(_half(action), ()) if action.kind != "R" else ():
            rested.settle(computing)

    def leave(self, computing: Stream) -> None:
        """Give up, after an action, the memory of what has gone down meanwhile."""
        on_its_way = self._on[computing.device]
        left, on_its_way.left, on_its_way.leaving = on_its_way.left, on_its_way.leaving, []
        for _, rested in left:
            rested.leave(computing)

    def end(self) -> None:
        """Wait for all copies, and take what rests from the devices."""
        for stream in self._streams:
            self.leave(stream)
            self.leave(stream)
        for device in self._on:
            for way in ("leaving", "arriving"):
                self._memory.side(device, f"activations {way}").synchronize()
        for refs in self._needed.values():
            for ref in refs:
                rested = ref()
                if rested is not None:
                    rested.forget()


def awake(value: T | Rested) -> T | Tensor:
    """Return a value; if it rests, where it is needed."""
    return value.get() if isinstance(value, Rested) else value


def _half(action: Action) -> _Half:
    return action.kind == "F", action.i, action.j
