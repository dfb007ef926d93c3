"""Aliases of parameters that live in host memory: an alias has memory only while its partition is on its device.

It keeps its identity meanwhile, so graphs that have saved the alias stay valid. `residence` says when weights come and
gradients go. Reading an alias without memory would end the process, so what leaves a partition, and at first each
operation, is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.stream import Stream, Streams
from torchgpipe.devices.torch_internals import memory_of, parameter_like, storage_key, versions
from torchgpipe.devices.typing import Leaf
from torchgpipe.gradients.aliases import Aliases, Slot
from torchgpipe.gradients.sums import sum_of
from torchgpipe.offload.host_memory import FrozenCopy, HostMemory, empty
from torchgpipe.offload.resting import Resting

__all__ = ["OffloadedAliases", "make_aliases", "resting_of"]


class OffloadedAliases(Aliases):
    """The aliases of parameters in host memory during a mini-batch.

    Args:
        slots, devices, streams, lock, backward, watched: see `Aliases`
        host_memory: takes weights to devices, and gradients back

    Attributes:
        host_memory: see above
        resting: what waits in host memory, if activations do
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        devices: Sequence[torch.device],
        streams: Streams | None,
        lock: AbstractContextManager[Any],
        *,
        backward: bool,
        watched: bool = False,
        host_memory: HostMemory,
    ) -> None:
        self.host_memory = host_memory
        #: By the key of the storage of an alias: its partition, and a name for errors.
        places = self._places = dict[int, tuple[int, str]]()
        # Not `self`: a cycle would keep the model alive.
        rests = Resting(host_memory, lambda tensor: storage_key(tensor) in places) if host_memory.rests else None
        self.resting: Resting | None = rests
        #: Aliases that keep their memory.
        self._kept: dict[Tensor, FrozenCopy] = {}
        #: What has come down of the gradient of an alias.
        self._came_down: dict[Tensor, Tensor] = {}
        #: What a parameter was when it first went up: its version, and its memory.
        self._seen: dict[Tensor, tuple[int, int]] = {}
        super().__init__(slots, devices, streams, lock, backward=backward, watched=watched)

    def _make(self, parameter: Tensor, j: int, name: str, *, trains: bool) -> Tensor:
        values, kept = self.host_memory.alias(parameter, self._devices[j], j)
        alias = parameter_like(parameter, values, requires_grad=trains)
        self._parameters[alias] = parameter
        if kept is not None:
            self._kept[alias] = kept
        if not name:  # The model uses it outside of its module, while partition j is on its device.
            self._fill(alias, j)
            name = self._places[self._key_of(parameter)][1]
        self._places[storage_key(alias)] = j, name
        return alias

    def _take_from(self, alias: Tensor, parameter: Tensor) -> Leaf:
        return sum_of(self._came_down.pop(alias, None), super()._take_from(alias, parameter))

    def fill(self, j: int) -> None:
        """Give the aliases of a partition memory and values, on the current stream.

        Raises:
            RuntimeError: a parameter has changed since its alias was last filled.
        """
        self.verify_unchanged(j)
        for alias in self.of(j):
            self._fill(alias, j)

    def _fill(self, alias: Tensor, j: int) -> None:
        self.host_memory.fill(alias, self._parameters[alias], self._devices[j], self._kept.get(alias))

    def verify_unchanged(self, j: int) -> None:
        """Check that the parameters of a partition are what they were when they first went up.

        Raises:
            RuntimeError: one has been changed in place, or has other memory.
        """
        for alias in self.of(j):
            parameter = self._parameters[alias]
            now = versions([parameter])[0], parameter.data_ptr()
            if self._seen.setdefault(parameter, now) != now:
                raise RuntimeError(
                    f"{self._places[storage_key(alias)][1]} was changed between forward and backward, which would "
                    "compute with other values; call backward() before optimizer.step()"
                )

    def verify_untouched(self, j: int) -> None:
        """Check that the model has not changed the aliases of a partition.

        Raises:
            RuntimeError: it has changed one in place, and the change would be lost.
        """
        aliases = self.of(j)
        if any(versions(aliases)):
            for alias in aliases:
                if versions([alias]) != [0]:
                    self.refuse_changed(alias)

    def empty(self, j: int) -> int:
        """Take the memory of the aliases of a partition, on the current stream, and return the bytes."""
        return sum([empty(alias) for alias in self.of(j) if alias not in self._kept])

    def bring_down(self, j: int, stream: Stream) -> None:
        """Take the gradients of a partition from its aliases to host memory, on a stream, which is the current one."""
        for alias in self.of(j):
            grad, alias.grad = alias.grad, None
            if grad is not None:
                grad = self.host_memory.bring_down(grad, stream)
                before = self._came_down.get(alias)
                if before is not None:
                    stream.synchronize()
                self._came_down[alias] = grad if before is None else sum_of(before, grad)  # type: ignore[assignment]

    def column_of(self, tensor: Tensor) -> int | None:
        """Return the partition of an alias, or of a view of it; None for other tensors."""
        return self._places.get(storage_key(tensor), (None, ""))[0]

    def verify_present(self, tensor: Tensor, j: int, user: str) -> None:
        """Check that a tensor has no memory that is there only while another partition is.

        Raises:
            RuntimeError: it is a weight of another partition, or a view of one, or it rests.
        """
        place = self._places.get(storage_key(tensor))
        if place is None and tensor.numel() and not memory_of(tensor).nbytes():
            raise RuntimeError(
                f"{user} in partition {j} uses a tensor of shape {tuple(tensor.shape)} of another micro-batch, which "
                "waits in host memory for its turn; pass on a copy (x.clone()), or give offload='weights'"
            )
        if place is not None and place[0] != j:
            raise RuntimeError(
                f"{user} in partition {j} uses the weight {place[1]} in partition {place[0]}, or a view of it, which "
                "is not on the device then; pass on a copy (weight.clone()), give a balance that keeps both in one "
                "partition, or leave out offload"
            )

    def verify_returned(self, tensors: Iterable[Leaf], where: str) -> None:
        """Check that no tensor that leaves a partition is a weight.

        Raises:
            RuntimeError: one is a weight, or a view of it, whose memory leaves the device.
        """
        for tensor in tensors:
            place = None if tensor is None else self._places.get(storage_key(tensor))
            if place is not None:
                raise RuntimeError(
                    f"{where} returns the weight {place[1]}, or a view of it, whose memory leaves the device under "
                    "offload; return a copy (weight.clone())"
                )

    def is_frozen(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight that is not trained, or a view of one."""
        key = storage_key(tensor)
        return any([storage_key(alias) == key and not alias.requires_grad for alias in self.all()])

    def refuse_changed(self, tensor: Tensor) -> None:
        """Refuse that the model changes a tensor, if that is a weight.

        Raises:
            RuntimeError: it is a weight.
        """
        place = self._places.get(storage_key(tensor))
        if place is not None:
            self.host_memory.forget_frozen()
            raise RuntimeError(
                f"the forward changes the weight {place[1]} in place, but under offload it is a copy on the device, "
                "and the change would be lost; change parameters between two calls, such as after optimizer.step(), or "
                "leave out offload"
            )

    def _key_of(self, parameter: Tensor) -> int:
        """Return the key of the storage of any alias of a parameter."""
        known = list(self._parameters.items())  # In one call: the workers of other devices add to it.
        return next(storage_key(alias) for alias, owner in known if owner is parameter)


def make_aliases(
    slots: Iterable[Slot],
    devices: Sequence[torch.device],
    streams: Streams | None,
    lock: AbstractContextManager[Any],
    host_memory: HostMemory | None,
    *,
    backward: bool,
    watched: bool = False,
) -> Aliases:
    """Return the aliases of a mini-batch, in host memory or not; see `Aliases` for the arguments."""
    if host_memory is None:
        return Aliases(slots, devices, streams, lock, backward=backward, watched=watched)
    return OffloadedAliases(slots, devices, streams, lock, backward=backward, watched=watched, host_memory=host_memory)


def resting_of(aliases: Aliases) -> Resting | None:
    """Return what waits in host memory, if anything does."""
    return aliases.resting if isinstance(aliases, OffloadedAliases) else None
