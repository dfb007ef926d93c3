"""Messages of two processes, here of two threads, which find each other in a store."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchgpipe.processes.messages import Messages


def pair(seconds: float = 5.0, store: Any = None) -> list[Messages]:
    store = store or dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(Messages, store, "pair", rank, 2, timedelta(seconds=seconds)) for rank in range(2)]
        return [one.result() for one in made]


def test_messages_are_found_by_their_keys_and_those_of_one_key_in_order() -> None:
    one, other = pair()
    for value in (1, [2], {"x": torch.arange(3)}):
        one.send(value, [0, 1], "a")
    one.send(None, [1], "b")
    assert other.receive(0, "b") is None
    for messages in (other, one):
        assert [messages.receive(0, "a") for _ in range(2)] == [1, [2]]
        assert messages.receive(0, "a")["x"].tolist() == [0, 1, 2]
    one.send(3, [1], "kept")
    assert [other.receive(0, "kept", keeps=True) for _ in range(2)] == [3, 3]
    other.forget(["kept"])


def test_neither_waits_for_the_other_to_receive() -> None:
    """No connection has so much room."""
    both, large = pair(), torch.arange(8_000_000)
    for rank, messages in enumerate(both):
        messages.send([large], [1 - rank], "large", "tensors")
        messages.send([large[:2]], [1 - rank], "small", "tensors")
    for rank, messages in enumerate(both):
        assert torch.equal(*messages.receive(1 - rank, "large"), large)
        assert messages.receive(1 - rank, "small")[0].tolist() == [0, 1]
        assert messages.counts == {"tensors sent": 2, "tensors bytes": large.nbytes + 16}


def test_a_connection_waits_longer_than_a_message() -> None:
    one, other = pair(0.2)
    time.sleep(0.6)
    one.send(1, [1], "a")
    assert other.receive(0, "a") == 1
    with pytest.raises(ConnectionError, match="nothing came within 0:00:00"):
        other.receive(0, "a")


def test_strangers_are_turned_away() -> None:
    store = dist.HashStore()

    def visit() -> None:
        store.wait(["pair/0"])
        host, port, _ = json.loads(store.get("pair/0"))
        with socket.create_connection((host, port)) as visitor:
            visitor.sendall(bytes(40))
            while visitor.recv(1):
                pass

    visitor = threading.Thread(target=visit)
    visitor.start()
    first = threading.Thread(target=lambda: made.append(Messages(store, "pair", 0, 2, timedelta(seconds=20))))
    made: list[Messages] = []
    first.start()
    visitor.join()
    other = Messages(store, "pair", 1, 2, timedelta(seconds=20))
    first.join()
    made[0].send(1, [1], "a")
    assert other.receive(0, "a") == 1


def test_threads_end_with_their_messages_and_the_other_is_told() -> None:
    before = {*threading.enumerate()}
    one, other = pair()
    one.send(1, [1], "a")
    del one
    gc.collect()
    assert other.receive(0, "a") == 1
    with pytest.raises(ConnectionError, match="its connection has ended"):
        other.receive(0, "b")
    other.send(torch.zeros(100), [0], "a")  # Lost, and no error.
    other.close()
    for _ in range(500):
        if not {*threading.enumerate()} - before:
            return
        time.sleep(0.01)
    pytest.fail(f"threads stay: {threading.enumerate()}")
