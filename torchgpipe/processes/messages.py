"""Messages from process to process, each found by its tag.

Both ends of a message know its tag and its size beforehand. Sending waits for nobody: the sender keeps a message until
it has left. Receiving waits for the message.

Gloo sends a tensor when the receiver has asked for it. If the question comes while the sender is busy with a message of
the same connection, a thread of gloo's waits for the sender in a loop, which takes the core from a sender that shares
it: longer than a short layer. So who knows what comes next asks for it beforehand, at the end of an action, and the
message has arrived when it is needed.

All messages are those of gloo, whose operations have tags: NCCL runs operations in their order, and both ends would
have to come to the same. So the host copies a tensor of an accelerator to its own memory first, and behind the message
back to the device.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.devices.typing import Leaf
from torchgpipe.processes.pauses import Pauses
from torchgpipe.processes.wire import in_two, pack, size_of_rest, unpack

__all__ = ["Messages"]


class _Message(NamedTuple):
    """The bytes of a message that is sent or is to be received, and what waits for them."""

    data: Tensor
    work: Any


class Messages:
    """The messages of one process to the others of its pipeline.

    Args:
        group: the processes; gloo, whose operations have tags

    Attributes:
        counts: how many messages and bytes were sent, by what they are
        pauses: what goes on while a message is waited for
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._sending: deque[_Message] = deque()
        self._lock = threading.Lock()
        #: By the rank that it comes from and its tag, what is expected, and what was asked for.
        self._expected: dict[tuple[int, int], int] = {}
        self._asked: dict[tuple[int, int], _Message] = {}
        self._abandoned: list[_Message] = []
        self.counts: Counter[str] = Counter()
        self.pauses = Pauses()

    def _begin_to_send(self, data: Tensor, to: int, tag: int) -> None:
        with self._lock:
            while self._sending and self._sending[0].work.is_completed():
                self._sending.popleft()
            self._sending.append(_Message(data, dist.isend(data, group=self._group, group_dst=to, tag=tag)))

    def send_tensors(self, tensors: Sequence[Leaf], size: int, to: int, tag: int, what: str) -> None:
        """Send tensors, and which of them exist, with their strides: sums in another order round.

        Args:
            tensors: the tensors, or None
            size: what `size_of` says of their forms, as far as both ends know them
            to: the rank that receives them
            tag: the tag
            what: names them in ``counts``
        """
        sizes = [tensor.nbytes for tensor in tensors if tensor is not None]
        self.counts[f"{what} sent"] += len(sizes)
        self.counts[f"{what} bytes"] += sum(sizes)
        packed = pack([*tensors], size)
        self._begin_to_send(packed, to, tag)

    def expect(self, size: int, source: int, tag: int) -> None:
        """Let `ask` make room for the next tensors with a tag, which `receive_tensors` returns."""
        with self._lock:
            self._expected[source, tag] = size

    def ask(self) -> None:
        """Ask for what is expected."""
        with self._lock:
            for key, size in self._expected.items():
                self._asked[key] = self._ask(size, *key)
            self._expected.clear()

    def abandon(self, size: int, source: int, tag: int) -> None:
        """Throw away what was expected, when it comes: the sender has sent it for that."""
        self._abandoned.append(self._asked_for(size, source, tag))

    def receive_tensors(self, size: int, source: int, tag: int, device: torch.device) -> list[Leaf]:
        """Return on a device what `send_tensors` has sent."""
        data, work = self._asked_for(size, source, tag)
        self.pauses.wait(work.wait)
        tensors: list[Leaf] = unpack(data, device)
        return tensors

    def _asked_for(self, size: int, source: int, tag: int) -> _Message:
        with self._lock:
            self._expected.pop((source, tag), None)
            return self._asked.pop((source, tag), None) or self._ask(size, source, tag)

    def _ask(self, size: int, source: int, tag: int) -> _Message:
        data = torch.empty(size, dtype=torch.uint8)
        return _Message(data, dist.irecv(data, group=self._group, group_src=source, tag=tag))

    def tell(self, value: Any, to: Sequence[int], tag: int) -> None:
        """Send plain data and tensors to several processes; see `pack`."""
        for part in filter(len, in_two(value)):
            for rank in to:
                self._begin_to_send(part, rank, tag)

    def hear(self, source: int, tag: int) -> Any:
        """Return what `tell` of ``source`` has sent."""
        first, _ = in_two(None)
        self.pauses.wait(partial(dist.recv, first, group=self._group, group_src=source, tag=tag))
        rest = first.new_empty(size_of_rest(first))
        if len(rest):
            self.pauses.wait(partial(dist.recv, rest, group=self._group, group_src=source, tag=tag))
        return unpack(torch.cat([first, rest]))

    def flush(self) -> None:
        """Wait until all has left."""
        while self._sending:
            with self._lock:
                sent = self._sending.popleft()
            sent.work.wait()
        while self._abandoned:
            self._abandoned.pop().work.wait()
