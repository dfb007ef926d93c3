"""Aliases of parameters that live in host memory: an alias has memory only while its column is resident.

It keeps its identity meanwhile, so graphs that have saved the alias stay valid. The tensors among the attributes of a
frozen parameter, such as the scales of a packed weight, have aliases of their own, which come and go with it.
`residence` says when weights are uploaded and evicted. Reading an alias without memory would end the process, so what
leaves a column, and at first each operation, is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.devices.stream import Mark, Stream, Streams
from torchgpipe.devices.torch_internals import memory_of, parameter_like, storage_key, versions
from torchgpipe.devices.typing import Leaf
from torchgpipe.gradients.aliases import Aliases, Slot
from torchgpipe.gradients.step_lock import StepLock
from torchgpipe.gradients.sums import sum_of
from torchgpipe.listener.listener import Heard, unheard
from torchgpipe.offload.host_memory import HostMemory

__all__ = ["OffloadedAliases", "make_aliases"]


class OffloadedAliases(Aliases):
    """The aliases of parameters in host memory during a mini-batch.

    Args:
        slots, devices, streams, lock, backward, watched: see `Aliases`
        host_memory: transfers weights to devices, and gradients back

    Attributes:
        host_memory: see above
    """

    all_resident = False

    def __init__(
        self,
        slots: Iterable[Slot],
        devices: Sequence[torch.device],
        streams: Streams | None,
        lock: StepLock,
        *,
        backward: bool,
        watched: bool = False,
        host_memory: HostMemory,
    ) -> None:
        self.host_memory = host_memory
        host_memory.streams = streams or host_memory.streams
        #: By the key of the storage of an alias: its column, and the alias.
        self._places: dict[int, tuple[int, Tensor]] = {}
        self._names: dict[Tensor, str] = {}
        #: What an alias was made with. The forward may give the alias other memory, packed for this device.
        self._memory: dict[Tensor, Tensor] = {}
        #: The attributes of an alias that are, or lead to, aliases of what its parameter has there.
        self._packed: dict[Tensor, dict[str, Any]] = {}
        #: The gradients of aliases that were downloaded.
        self._downloaded: dict[Tensor, Tensor] = {}
        #: What a parameter was when it was first uploaded: its version, and its memory.
        self._seen: dict[Tensor, tuple[int, int]] = {}
        super().__init__(slots, devices, streams, lock, backward=backward, watched=watched)

    def _make(self, parameter: Tensor, j: int, name: str, *, trains: bool) -> Tensor:
        values = self.host_memory.alias(parameter, self._devices[j])
        alias = parameter_like(parameter, values, requires_grad=trains)
        self._memory[alias] = values
        if not name:  # The model uses it outside of its module, while column j is resident.
            self._fill(alias, parameter, j)
        self._names.setdefault(parameter, name)
        self._places[storage_key(alias)] = j, alias
        return alias

    def _attributes(self, parameter: Tensor, alias: Tensor, j: int, name: str) -> dict[str, Any]:
        own, attributes = vars(parameter), super()._attributes(parameter, alias, j, name)
        self._packed[alias] = {name: value for name, value in attributes.items() if value is not own[name]}
        return attributes

    def _values(self, alias: Tensor) -> Tensor:
        return self._memory[alias]

    def _keep_memory(self, parameter: Tensor, alias: Tensor) -> None:
        """Keep the parameter in host memory: `verify_untouched` refuses other memory of an alias."""

    def _take_from(self, alias: Tensor, parameter: Tensor) -> Leaf:
        before = self._downloaded.pop(alias, None)
        # In a proof over processes, some parameters are on their devices.
        return sum_of(None if before is None else before.to(parameter.device), super()._take_from(alias, parameter))

    def at(self, tensor: Tensor, j: int) -> Tensor | None:
        """Return the alias in column ``j`` of a parameter, or the same view of it, given a view of an alias."""
        known = super().at(tensor, j)
        column, alias = self._places.get(storage_key(tensor), (j, tensor))
        if known is not None or column == j or tensor.dtype != alias.dtype or tensor.is_conj() or tensor.is_neg():
            return known
        # The memory of the view leaves with its column. Views change shapes only, so the same elements are in both.
        view = self.make(alias, j).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return view if tensor.requires_grad else view.detach()

    def upload(self, columns: Sequence[int], heard: Heard = unheard) -> Mark:
        """Begin the upload of the weights of columns on one device, and return the mark of its end.

        Raises:
            RuntimeError: a parameter has changed since it was first uploaded.
        """
        up = self.host_memory.up(self._devices[columns[0]])
        with up.use(), heard(up):
            for j in columns:
                self.verify_unchanged(j)
                for alias in self.of(j):
                    self._fill(alias, self._parameters[alias], j)
            return up.mark()

    def _fill(self, alias: Tensor, parameter: Tensor, j: int) -> None:
        self.host_memory.fill(self._memory[alias], parameter, self._devices[j])

    def evict(self, j: int, computing: Stream) -> None:
        """Free the memory of the weights of column ``j``, when the computation is through with them."""
        up = self.host_memory.up(computing.device)
        up.wait(computing.mark())
        with up.use():
            for alias in self.of(j):
                self._memory[alias].untyped_storage().resize_(0)

    def download(self, j: int, computing: Stream, heard: Heard = unheard) -> None:
        """Begin the download of the gradients of column ``j``, when they are computed; the aliases lose them."""
        down = self.host_memory.down(computing.device)
        down.wait(computing.mark())
        with down.use(), heard(down):
            for alias in self.of(j):
                grad, alias.grad = alias.grad, None
                if grad is not None:
                    grad = self.host_memory.download(grad, down)
                    before = self._downloaded.get(alias)
                    if before is not None:
                        down.synchronize()
                    self._downloaded[alias] = grad if before is None else sum_of(before, grad)  # type: ignore[assignment]

    def verify_unchanged(self, j: int) -> None:
        """Check that the parameters of a column are what they were when they were first uploaded.

        Raises:
            RuntimeError: one has been changed in place, or has other memory.
        """
        for alias in self.of(j):
            parameter = self._parameters[alias]
            now = versions([parameter])[0], parameter.data_ptr()
            if self._seen.setdefault(parameter, now) != now:
                raise RuntimeError(
                    f"{self._name(alias)} was changed between forward and backward, which would "
                    "compute with other values; call backward() before optimizer.step()"
                )

    def verify_untouched(self, j: int) -> None:
        """Check that the model has not changed the aliases of a column.

        Raises:
            RuntimeError: it has changed one in place, and the change would be lost; or it has taken tensors from one,
                which have no memory when another mini-batch finds them.
        """
        for alias in self.of(j):
            taken = [name for name, value in self._packed.get(alias, {}).items() if vars(alias).get(name) is not value]
            if taken:
                raise RuntimeError(
                    f"the forward takes {', '.join(taken)} from the weight {self._name(alias)}, but "
                    "under offload these are on the device only while it computes; load the model in another format "
                    "(bitsandbytes: load_in_4bit=True), or leave out offload"
                )
        for alias, version in zip(self.of(j), versions(self.of(j))):
            if version or (alias.requires_grad and storage_key(alias) != storage_key(self._memory[alias])):
                self.refuse_changed(self._memory[alias])

    def _name(self, alias: Tensor) -> str:
        return self._names[self._parameters[alias]]

    def column_of(self, tensor: Tensor) -> int | None:
        """Return the column of an alias, or of a view of it; None for other tensors."""
        return self._places.get(storage_key(tensor), (None,))[0]

    def verify_present(self, tensor: Tensor, j: int, user: str) -> None:
        """Check that a tensor has memory while column ``j`` is resident.

        Raises:
            RuntimeError: it is a weight of another column, or a view of one, or was evicted.
        """
        place = self._places.get(storage_key(tensor))
        if place is None and tensor.numel() and not memory_of(tensor).nbytes():
            raise RuntimeError(
                f"{user} in partition {j} uses a tensor of shape {tuple(tensor.shape)} of another micro-batch, which "
                "waits in host memory for its turn; pass on a copy (x.clone()), or give offload='weights'"
            )
        if place is not None and place[0] != j:
            raise RuntimeError(
                f"{user} in partition {j} uses the weight {self._name(place[1])} in partition {place[0]}, or a view of "
                "it, which is not on the device then; pass on a copy (weight.clone()), give a balance that keeps both "
                "in one partition, or leave out offload"
            )

    def verify_returned(self, tensors: Iterable[Leaf], where: str) -> None:
        """Check that no tensor that leaves a column is a weight.

        Raises:
            RuntimeError: one is a weight, or a view of it, which will be evicted.
        """
        for tensor in tensors:
            place = None if tensor is None else self._places.get(storage_key(tensor))
            if place is not None:
                raise RuntimeError(
                    f"{where} returns the weight {self._name(place[1])}, or a view of it, whose memory leaves the "
                    "device under offload; return a copy (weight.clone())"
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
            raise RuntimeError(
                f"the forward changes the weight {self._name(place[1])} in place, but under offload it is a copy on "
                "the device, and the change would be lost; change parameters between two calls, such as after "
                "optimizer.step(), or leave out offload"
            )


def make_aliases(
    slots: Sequence[Slot],
    devices: Sequence[torch.device],
    streams: Streams | None,
    lock: StepLock,
    host_memory: HostMemory | None,
    *,
    backward: bool,
    watched: bool = False,
) -> Aliases:
    """Return the aliases of a mini-batch, given all slots of the model, in host memory or not; see `Aliases`."""
    if host_memory is None:
        return Aliases(slots, devices, streams, lock, backward=backward, watched=watched)
    return OffloadedAliases(slots, devices, streams, lock, backward=backward, watched=watched, host_memory=host_memory)
