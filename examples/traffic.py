"""Count the bytes that a pipeline copies between its partitions, for each pair and direction::

    pipeline = GPipe(model, balance=[1, 1], devices=["cpu:0", "cpu:1"], chunks=4)
    with traffic(pipeline) as copied:
        pipeline(input).sum().backward()
    copied[0, 1], copied[1, 0]  # forward, backward

Nothing is estimated. A pipeline tells its recorder when a copy begins and ends, and which partitions the copy connects.
The bytes that PyTorch copies in the same thread between these two moments are summed. All devices are treated as having
separate memories. So ``'cpu:0'`` and ``'cpu:1'``, which share one memory, get copies like two GPUs, and any machine can
count.

This uses `Mechanisms`, which is for the library's own tests and benchmarks, and not part of the public interface.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe import GPipe
from torchgpipe.devices.stream import Streams
from torchgpipe.listener.listener import Kind, Place


@contextmanager
def traffic(pipeline: GPipe) -> Iterator[Counter[tuple[int, int]]]:
    """Count the bytes copied in a ``with`` block, by source and target partition."""
    counting = _Counting()
    before = pipeline._mechanisms
    pipeline._mechanisms = replace(before, streams=_Apart(), recorder=counting)
    try:
        with counting:
            yield counting.copied
    finally:
        pipeline._mechanisms = before


class _Apart(Streams):
    def moves(self, source: torch.device, target: torch.device) -> bool:
        return source != target


class _Counting(TorchDispatchMode):
    """A recorder, which gets the partitions of each copy, and a dispatch mode, which sees the copied tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: Counter[tuple[int, int]] = Counter()
        self.source: object = None
        self._lock = threading.Lock()
        self._thread = threading.local()

    def begin_step(self, m: int, places: Sequence[Place]) -> "_Counting":
        return self

    def begin(self, kind: Kind, i: int, j: int, other: int | None, stream: Any) -> Callable[[bool], None]:
        if kind != "copy":
            return lambda failed: None
        self._thread.way = j, other
        return lambda failed: setattr(self._thread, "way", None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        way = getattr(self._thread, "way", None)
        if way is not None and func is torch.ops.aten._to_copy.default:
            with self._lock:
                self.copied[way] += args[0].nbytes
        return func(*args, **(kwargs or {}))
