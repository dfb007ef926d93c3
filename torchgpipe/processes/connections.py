"""A connection between every two processes of a pipeline, which find each other in the store of the process group."""

from __future__ import annotations

import json
import secrets
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from struct import Struct, pack
from typing import Any

__all__ = ["connected", "read"]

#: What a process says first that connects: what the other has put into the store for it, and its rank.
_HELLO = Struct("<32sq")

#: The seconds in which it says so.
_PATIENCE = 5.0


def connected(store: Any, name: str, rank: int, size: int, timeout: timedelta) -> dict[int, socket.socket]:
    """Return connections to all other processes, by their ranks.

    Args:
        store: where processes find each other
        name: the name of the pipeline there
        rank: the rank of this process
        size: the number of processes
        timeout: how long to wait for another, and later for room for what is sent

    Raises:
        RuntimeError: another process does not come.
    """
    peers: dict[int, socket.socket] = {}
    seconds, token = timeout.total_seconds(), secrets.token_hex(16)
    address, family = _address(store)
    try:
        with socket.create_server((address, 0), family=family, backlog=size) as server:
            server.settimeout(seconds)
            store.set(f"{name}/{rank}", json.dumps([*server.getsockname()[:2], token]))
            for other in range(rank):
                store.wait([f"{name}/{other}"], timeout)
                host, port, word = json.loads(store.get(f"{name}/{other}"))
                peers[other] = socket.create_connection((host, port), seconds)
                peers[other].sendall(_HELLO.pack(word.encode(), rank))
            while len(peers) < size - 1:
                peer, _ = server.accept()
                peer.settimeout(_PATIENCE)
                with suppress(OSError):
                    hello = peer.recv(_HELLO.size)
                    if hello[:32] == token.encode():
                        peers[_HELLO.unpack(hello)[1]] = peer
                        continue
                peer.close()  # It is nobody of this pipeline.
    except OSError as error:
        raise RuntimeError(
            f"rank {rank} of {size}, at {address}, has not come to all other processes: {error}"
        ) from error
    for peer in peers.values():
        # What is large takes one call of the system in this way, in which other threads run.
        peer.settimeout(None)
        if sys.platform != "win32":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pack("ll", int(seconds), int(seconds % 1 * 1e6)))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peers


def _address(store: Any) -> tuple[str, socket.AddressFamily]:
    """Return the address of this host in the network in which it reaches the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with suppress(OSError):
        host = getattr(store, "host", None) or socket.gethostname()
        family, *_, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # Which sends nothing.
            probe.connect(target)
            return probe.getsockname()[0], family
    return "127.0.0.1", socket.AF_INET


def read(peer: socket.socket, into: Any) -> Any:
    """Fill a buffer with what comes over a connection, wait for that as long as it stands, and return the buffer.

    Raises:
        OSError: it has ended.
    """
    room = memoryview(into)
    while room:
        count = peer.recv_into(room, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("its connection has ended")
        room = room[count:]
    return into
