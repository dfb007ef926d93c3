"""Count what is transferred between host memory and devices, and what is on the devices meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchgpipe.devices.torch_internals import memory_of
from torchgpipe.offload.aliases import OffloadedAliases
from torchgpipe.offload.host_memory import HostMemory

__all__ = ["Transfers", "counted", "transfers_of"]


class Transfers:
    """The transfers of a pipeline.

    Attributes:
        uploads: the number of times that the weights of a partition were uploaded
        bytes_up: the bytes of weights that were uploaded
        bytes_down: the bytes of gradients that were downloaded
        present: for each device, the bytes of weights that are there
        peaks: for each device, the most bytes of weights that were there at a time
    """

    def __init__(self) -> None:
        self.uploads = self.bytes_up = self.bytes_down = 0
        self.present: Counter[torch.device] = Counter()
        self.peaks: Counter[torch.device] = Counter()


_transfers = WeakKeyDictionary[HostMemory, Transfers]()
_lock = threading.RLock()


def transfers_of(memory: HostMemory | None) -> Transfers:
    """Return what was transferred since `counted` has been entered."""
    assert memory is not None
    with _lock:
        return _transfers.setdefault(memory, Transfers())


@contextmanager
def counted() -> Iterator[None]:
    """Count the transfers of all pipelines in a ``with`` block."""
    fill, download, upload, evict = (
        HostMemory.fill, HostMemory.download, OffloadedAliases.upload, OffloadedAliases.evict
    )  # fmt: skip

    def counted_fill(self: HostMemory, alias: Tensor, parameter: Tensor, device: torch.device) -> None:
        fill(self, alias, parameter, device)
        bytes, of = alias.untyped_storage().nbytes(), transfers_of(self)
        with _lock:
            of.bytes_up += bytes
            of.present[device] += bytes
            of.peaks[device] = max(of.peaks[device], of.present[device])

    def counted_download(self: HostMemory, grad: Tensor, stream: Any) -> Tensor:
        with _lock:
            transfers_of(self).bytes_down += memory_of(grad).nbytes()
        return download(self, grad, stream)

    def counted_upload(self: OffloadedAliases, *args: Any) -> Any:
        mark = upload(self, *args)
        with _lock:
            transfers_of(self.host_memory).uploads += 1
        return mark

    def counted_evict(self: OffloadedAliases, j: int, computing: Any) -> None:
        bytes = sum([self._memory[alias].untyped_storage().nbytes() for alias in self.of(j)])
        evict(self, j, computing)
        with _lock:
            transfers_of(self.host_memory).present[computing.device] -= bytes

    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (HostMemory, "fill", counted_fill), (HostMemory, "download", counted_download),
        (OffloadedAliases, "upload", counted_upload), (OffloadedAliases, "evict", counted_evict),
    ]  # fmt: skip
    with ExitStack() as stack:
        for kind, name, run in patches:
            stack.enter_context(mock.patch.object(kind, name, run))
        yield
