"""Messages from process to process, each found by its key.

A message says all of what it is, so nobody must know it beforehand. For each other process, a thread sends, and a
thread takes in at once what comes from there: so sending waits for nobody, and no two processes wait for each other.

    send ──► connection ──► inbox, by sender and key ──► receive, which waits for it

Gloo was tried, and sends a tensor when the receiver has asked for it under its size: both ends had to know the sizes,
and a question that came while the sender computed kept a core busy. NCCL runs operations in their order, and both ends
would have to come to the same. So the host copies a tensor of an accelerator to its own memory first, and behind the
message back to the device.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from socket import SHUT_RDWR, socket
from struct import Struct
from typing import Any

import torch

from torchgpipe.processes.connections import connected, read
from torchgpipe.processes.inbox import Inbox
from torchgpipe.processes.wire import pack, unpack

__all__ = ["Messages"]

#: In front of each message: its length, and its key.
_HEAD = Struct("<q48s")

#: The most bytes that whoever sends them transmits itself.
_SMALL = 1 << 16


def _take_in(inbox: Inbox, peer: socket, source: int) -> None:
    """Take in what comes over a connection until it ends, and close it."""
    try:
        with peer:
            while True:
                size, key = _HEAD.unpack(read(peer, bytearray(_HEAD.size)))
                data = torch.empty(size, dtype=torch.uint8, device="cpu")
                read(peer, data.numpy())
                inbox.put((source, key), data)
    except OSError as error:
        inbox.lose(source, error)


def _close(peers: Sequence[socket]) -> None:
    for peer in peers:
        with suppress(OSError):  # It may have ended.
            peer.shutdown(SHUT_RDWR)


class Messages:
    """The messages of one process to the others of its pipeline.

    Args:
        store: where processes find each other
        name: the name of the pipeline there
        rank: the rank of this process in the pipeline
        size: the number of processes
        timeout: how long to wait for a message

    Attributes:
        counts: how many messages and bytes were sent, by what they are
        inbox: what has come, and what waits for it
        close: ends the connections
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, timeout: timedelta) -> None:
        self._rank, self._timeout = rank, timeout
        self.counts: Counter[str] = Counter()
        self.inbox = Inbox()
        peers = connected(store, name, rank, size, timeout)
        self._peers = peers
        #: By rank, the threads that send what takes long, and what they sent last.
        self._senders = {rank: ThreadPoolExecutor(1, f"torchgpipe to {rank}") for rank in peers}
        self._last = {rank: Future[None]() for rank in peers}
        self._lock = threading.Lock()
        # Also when nobody has this object any more: the threads that read do not.
        self.close = weakref.finalize(self, _close, [*peers.values()])
        for rank, peer in peers.items():
            self._last[rank].set_result(None)
            name = f"torchgpipe from {rank}"
            threading.Thread(target=_take_in, args=(self.inbox, peer, rank), name=name, daemon=True).start()

    def send(self, value: Any, to: Sequence[int], key: str, what: str = "") -> None:
        """Send a value to several processes, see `pack`. What is sent to one that has ended is lost.

        Args:
            value: the value; a list of tensors if it is counted
            to: the ranks; a process may send to itself
            key: the key, of at most 48 letters
            what: names it in ``counts``; not counted if empty
        """
        if what:
            sizes = [tensor.nbytes for tensor in value if tensor is not None]
            self.counts[f"{what} sent"] += len(sizes)
            self.counts[f"{what} bytes"] += sum(sizes)
        data = pack(value, _HEAD.size)
        room: Any = data.numpy()
        _HEAD.pack_into(room, 0, len(data) - _HEAD.size, key.encode())
        for rank in to:
            if rank == self._rank:
                self.inbox.put((rank, _padded(key)), data[_HEAD.size :].clone())
                continue
            with self._lock:
                if len(room) > _SMALL or not self._last[rank].done():
                    self._last[rank] = self._senders[rank].submit(self._transmit, rank, room)
                else:  # In less time than it takes to wake a thread.
                    self._transmit(rank, room)

    def _transmit(self, rank: int, data: Any) -> None:
        try:
            self._peers[rank].sendall(data)
        except OSError as error:
            self.inbox.lose(rank, error)

    def receive(
        self,
        source: int,
        key: str,
        device: torch.device | None = None,
        wait: Callable[[Callable[[], bool]], object] | None = None,
        *,
        keeps: bool = False,
    ) -> Any:
        """Return the next value that a process has sent under a key.

        Args:
            source: the rank of the process
            key: the key
            device: where its tensors go, if not to the host
            wait: waits until a function returns true; by default, whatever has paused goes on meanwhile
            keeps: whether to keep it for those that ask for the same, until `forget`

        Raises:
            ConnectionError: it does not come.
        """
        inbox, place, end = self.inbox, (source, _padded(key)), time.monotonic() + self._timeout.total_seconds()
        (wait or inbox.until)(lambda: place in inbox or source in inbox.lost or time.monotonic() > end)
        if place not in inbox:
            raise ConnectionError(inbox.lost.get(source, f"nothing came within {self._timeout}"))
        return unpack(inbox.pop(place, keeps=keeps), device)

    def forget(self, keys: Iterable[str]) -> None:
        """Forget what was kept under these keys."""
        self.inbox.forget({*map(_padded, keys)})


def _padded(key: str) -> bytes:
    return key.encode().ljust(48, b"\0")
