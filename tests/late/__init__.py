"""An accelerator in host memory, for tests: devices whose work is done later, in streams that are threads.

    if late.available():
        late.load()                       # before the first backward of the process
        x = torch.ones(3, device="late:0")
        late.hazards()                    # what no event orders, whatever the timing

See README.md beside this file.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tests.late import build
from tests.late.module import make

__all__ = [
    "Counts",
    "Interval",
    "Speed",
    "available",
    "counts",
    "delays",
    "hazards",
    "held",
    "intervals",
    "load",
    "loaded",
    "now",
    "on_clock",
]


class Counts(NamedTuple):
    """What has happened since the library was loaded.

    Attributes:
        launches: pieces of work that were queued
        worked: operators that the host did itself, because the shapes of their results depend on data
        waits: times that the host waited for a stream
    """

    launches: int
    worked: int
    waits: int


class Speed(NamedTuple):
    """The speed of a simulated device.

    Attributes:
        flops: FLOP a second, of products of matrices
        bandwidth: bytes a second, of its memory
        link: bytes a second, between devices
        kernel: seconds that a kernel takes beside
        latency: seconds that a copy takes beside
        wall: whether the host's time is that of the wall. If not, it is what this process has computed, and the times
            that it has waited for are skipped: other programs do not count.
    """

    flops: float
    bandwidth: float
    link: float
    kernel: float = 2e-6
    latency: float = 1e-5
    wall: bool = False


class Interval(NamedTuple):
    """What a stream does from when to when, in seconds: ``kind`` is ``'kernel'`` or ``'copy'``."""

    device: int
    stream: int
    kind: str
    start: float
    end: float


def available() -> bool:
    """Return whether the library is there, or can be built."""
    return build.library().exists() or build.compiler() is not None


def loaded() -> bool:
    """Return whether the devices are there."""
    return "late_C" in sys.modules


def load() -> None:
    """Build the library unless it is there, and make ``'late:0'``, ``'late:1'``, ... and ``torch.late``.

    It cannot be unloaded, and it is the current accelerator from now on. The autograd engine counts devices at the
    first backward of a process, so this comes before.

    Raises:
        tests.late.build.NoCompiler: it is not there, and there is no compiler.
    """
    _library()


@functools.cache
def _library() -> Any:
    path = build.build()
    torch.utils.rename_privateuse1_backend("late")
    spec = importlib.util.spec_from_file_location("late_C", path)
    assert spec is not None and spec.loader is not None
    library = sys.modules["late_C"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    torch._register_device_module("late", make(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return library


def hazards() -> list[str]:
    """Return the uses of memory that no event orders, and forget them."""
    found: list[str] = _library().hazards()
    return found


@contextmanager
def delays(most: int, every: int = 1) -> Iterator[None]:
    """Delay every ``every``-th piece of work, at random, by at most ``most`` microseconds, while the block runs."""
    before = _library().delays(most, every)
    try:
        yield
    finally:
        _library().delays(*before)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Let work that is queued on a stream from now on wait until the block ends: no test needs to sleep for it."""
    hold = _library().hold(stream.device.index, stream.stream_id)
    try:
        yield
    finally:
        hold.release()


def counts() -> Counts:
    """Return what has happened so far."""
    return Counts(*_library().counts())


@contextmanager
def on_clock(speed: Speed) -> Iterator[None]:
    """Take the time that devices of that speed would take, and compute nothing, while the block runs.

    Tensors hold zeros, or what was there before, and hazards are not looked for.
    """
    _library().set_clock(*speed)
    try:
        yield
    finally:
        _library().unset_clock()


def now() -> float:
    """Return the host's time on the clock, in seconds."""
    time: float = _library().now()
    return time


def intervals() -> list[Interval]:
    """Return what the streams have done, and will do, on the clock since the last call."""
    return [Interval(*one) for one in _library().intervals()]
