"""Several accelerators without hardware: a missing wait gives a wrong number, and so does a missing record.

The devices are ``'cpu:0'``, ``'cpu:1'``, ...; their tensors lie in the host's memory. Every operation is finished when
the call returns, but its result is hidden: `FakeAccelerator`, a dispatch mode, sees each operation and keeps a vector
clock per stream, which tells which operations of other streams are certain to be finished.

    computing of cpu:0     ──add──┬────────────
                                  │ wait
    leaving of cpu:0       ───────┴──copy──       copy sees what add has written
    arriving of cpu:1      ───────────mul──       mul, which has not waited, sees NaN instead

The rules are those of CUDA:

1. An operation runs on the current stream of its tensors' device: the stream of the innermost
   ``with stream.use()`` in this thread, or else the device's computing stream. (The autograd engine uses the
   stream of the forward. The two are equal as long as forward and backward use the same streams.)
2. A stream that reads before it has waited for the writing stream reads NaN (or, for a type without NaN, the
   largest number).
3. A tensor that is overwritten or freed while another stream may still read it is overwritten too early:
   everything computed from that reading turns into NaN. Freed memory is reused at once. So waiting suffices only if
   the stream that allocated the memory waits before the memory is freed; ``record`` always suffices.
4. Tensors of two devices do not mix. A copy between devices reads on the current stream of the source, and both
   current streams wait for each other before and after the copy, as in PyTorch.
5. The host sees only what the computing streams have waited for.

Tensors made outside of the mode, and not `place`\\ d, are older than all operations and belong to every device. Tensors
without elements are ignored, and so are reads without an operation of PyTorch (``tolist``, ``numpy``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from torchgpipe import GPipe
from torchgpipe.devices.stream import Mark, Stream, Streams

__all__ = ["FakeAccelerator", "FakeStream", "Launch", "on_fake_devices"]

aten = torch.ops.aten


class Launch(NamedTuple):
    """An operation: the ``tick``-th event on ``stream``, the events finished at its start, and its result's memory."""

    stream: FakeStream
    name: str
    tick: int
    seen: dict[FakeStream, int]
    target: torch.device

    def precedes(self, other: Launch) -> bool:
        """Return whether this operation is certain to be finished when ``other`` starts."""
        return other is not self and other.seen.get(self.stream, 0) >= self.tick

    def overlaps(self, other: Launch) -> bool:
        """Return whether this operation and ``other`` may run at the same time."""
        return other is not self and not self.precedes(other) and not other.precedes(self)


class FakeStream(Stream):
    """A queue of work. ``seen`` is its vector clock: the progress of each stream when this one last waited for it."""

    def __init__(self, accelerator: FakeAccelerator, device: torch.device, name: str) -> None:
        super().__init__(device)
        self.name = name
        self.seen: dict[FakeStream, int] = {self: 0}
        self._accelerator = accelerator

    def __repr__(self) -> str:
        return f"{self.name} of {self.device}"

    def mark(self) -> Mark:
        return self._accelerator.mark(self)

    def wait(self, mark: Mark) -> None:
        self._accelerator.wait(self, mark)

    def record(self, tensor: Tensor) -> None:
        self._accelerator.record(self, tensor)

    @contextmanager
    def use(self) -> Iterator[None]:
        with self._accelerator.current.using(self):
            yield

    def merge(self, seen: dict[FakeStream, int]) -> None:
        for stream, tick in seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), tick)


class _Current(threading.local):
    """The current streams of a thread, by device; the last one is that of the current device."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, FakeStream] = {}

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        previous = self.streams
        others = {device: other for device, other in previous.items() if device != stream.device}
        self.streams = {**others, stream.device: stream}
        try:
            yield
        finally:
            self.streams = previous

    @property
    def device(self) -> torch.device | None:
        return next(reversed(self.streams), None)


class _FakeStreams(Streams):
    def __init__(self, accelerator: FakeAccelerator) -> None:
        self._accelerator = accelerator

    def current(self, device: torch.device) -> Stream:
        return self._accelerator.current_stream(device)

    def side(self, device: torch.device, purpose: str) -> Stream:
        return self._accelerator.stream(device, purpose)

    def device_of(self, tensor: Tensor) -> torch.device | None:
        return self._accelerator.device_of(tensor)

    def moves(self, source: torch.device, target: torch.device) -> bool:
        return source != target


@dataclass(eq=False)
class _Memory:
    """The history of a storage."""

    ref: StorageWeakRef
    dtype: torch.dtype
    device: torch.device
    #: The stream whose next allocation may reuse this memory; None if the memory is never freed.
    home: FakeStream | None = None
    written: Launch | None = None
    #: The operations that have read or written this memory, with their results' memory.
    uses: list[tuple[Launch, _Memory | None]] = field(default_factory=list)
    recorded: set[FakeStream] = field(default_factory=set)


class FakeAccelerator(TorchDispatchMode):
    """The devices and their streams, as a mode to activate around forward and backward.

    Attributes:
        streams: the stream vocabulary for the pipeline
        hazards: a line for each rule that was broken
        launches: all operations so far
        current: the current streams of this thread
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams = _FakeStreams(self)
        self.hazards: list[str] = []
        self.launches: list[Launch] = []
        self.current = _Current()
        self._lock = threading.RLock()
        self._named: dict[tuple[torch.device, str], FakeStream] = {}
        self._memories: dict[int, _Memory] = {}
        #: Memory that may be freed too early.
        self._lent: dict[_Memory, None] = {}

    def stream(self, device: torch.device | str, name: str) -> FakeStream:
        """Return the stream of that name; the computing stream is called ``'computing'``."""
        device = torch.device(device)
        if device.type != "cpu" or device.index is None:
            raise ValueError(f"fake devices are called 'cpu:0', 'cpu:1', ..., but got '{device}'")
        with self._lock:
            if (device, name) not in self._named:
                self._named[device, name] = FakeStream(self, device, name)
            return self._named[device, name]

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current.streams.get(device) or self.stream(device, "computing")

    def place(self, tensor: Tensor, device: torch.device | str) -> None:
        """Assign an existing tensor to ``device``."""
        self._remember(tensor, torch.device(device), home=None)

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the device of ``tensor``; None if it belongs to every device."""
        with self._lock:
            memory = self._memory(tensor)
            return None if memory is None else memory.device

    def alive(self) -> int:
        """Count the pieces of memory on the devices that are not freed."""
        with self._lock:
            return sum(memory.home is not None and not memory.ref.expired() for memory in self._memories.values())

    def mark(self, stream: FakeStream) -> dict[FakeStream, int]:
        with self._lock:
            return dict(stream.seen)

    def wait(self, stream: FakeStream, mark: dict[FakeStream, int]) -> None:
        with self._lock:
            self._reuse_freed()
            stream.merge(mark)

    def record(self, stream: FakeStream, tensor: Tensor) -> None:
        with self._lock:
            memory = self._memory(tensor)
            if memory is not None:
                memory.recorded.add(stream)

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._reuse_freed()
        for memory in self._memories.values():  # rule 5
            if _pending(memory.written, self.stream(memory.device, "computing")):
                _spoil(memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self._lock:
            self._reuse_freed()
            if func.is_view:
                return func(*args, **kwargs)
            inputs = [(tensor, self._memory(tensor)) for tensor in _tensors((args, kwargs))]
            known = [(tensor, memory) for tensor, memory in inputs if memory is not None]
            devices = list(dict.fromkeys(memory.device for _, memory in known))
            if inputs and not devices and self.current.device is not None:
                devices = [self.current.device]
            source, target = self._devices(func, kwargs, devices)
            if target is None:
                return func(*args, **kwargs)
            stream, home = self.current_stream(source or target), self.current_stream(target)
            stream.merge(home.seen)  # rule 4; within one device, both are the same stream
            launch = self._launch(stream, func, target)
            home.merge(stream.seen)

            written = _written(func, args, kwargs)
            modified = {id(self._memory(tensor)) for tensor in written}
            stale: dict[int, Tensor] = {}
            for tensor, memory in known:
                if _reads(func) and id(memory) not in modified and _pending(memory.written, stream):
                    self.hazards.append(f"{launch.name} on {stream} reads what {_by(memory)} without waiting for it")
                    stale[id(tensor)] = _wrong(tensor)
            spoilt = [memory for _, memory in known if id(memory) in modified and self._overwrites(launch, memory)]

            result = func(*_exchange(args, stale), **_exchange(kwargs, stale))

            for tensor in written:
                memory = self._memory(tensor) or self._remember(tensor, target, home=None)
                memory.written = launch
            results = [
                self._memory(tensor) or self._remember(tensor, target, home=home, written=launch)
                for tensor in _tensors(result)
            ]
            for _, memory in known:
                for after in results or [None]:
                    memory.uses.append((launch, after))
                if memory.home not in (None, stream):
                    self._lent[memory] = None
            for memory in spoilt:
                _spoil(memory)
            return result

    def _launch(self, stream: FakeStream, func: Any, target: torch.device) -> Launch:
        stream.seen[stream] += 1
        launch = Launch(stream, func.overloadpacket.__name__, stream.seen[stream], dict(stream.seen), target)
        launch.seen[stream] -= 1  # the operation itself is not finished yet
        self.launches.append(launch)
        return launch

    def _devices(
        self, func: Any, kwargs: Any, known: list[torch.device]
    ) -> tuple[torch.device | None, torch.device | None]:
        """Return the device that an operation reads from, or None, and the device of its result."""
        wanted = kwargs.get("device")
        if wanted is not None and wanted.index is not None:
            return (known[0] if known and func is aten._to_copy.default else None), wanted
        if len(known) == 2 and func is aten.copy_.default:
            return known[1], known[0]
        if len(known) > 1:
            raise RuntimeError(f"{func} mixes tensors of {' and '.join(map(str, known))}")
        device = known[0] if known else None
        return device, device

    def _overwrites(self, launch: Launch, memory: _Memory) -> bool:
        """Check a modification in place, and return whether its result is wrong."""
        for use, after in memory.uses:
            if use is not memory.written and _pending(use, launch.stream):
                self.hazards.append(
                    f"{launch.name} on {launch.stream} overwrites what {use.name} on {use.stream} may still read"
                )
                if after is not None and after is not memory:
                    _spoil(after)
        if _pending(memory.written, launch.stream):
            self.hazards.append(f"{launch.name} on {launch.stream} modifies what {_by(memory)} without waiting for it")
            return True
        return False

    def _reuse_freed(self) -> None:
        """Check rule 3 for the memory that was freed since the last operation."""
        freed = [memory for memory in self._lent if memory.ref.expired()]
        if not freed:
            return
        for memory in freed:
            del self._lent[memory]
            assert memory.home is not None
            for use, after in memory.uses:
                if use.stream not in memory.recorded and _pending(use, memory.home):
                    self.hazards.append(
                        f"what {_by(memory)} was freed, and its memory used again by {memory.home}, while {use.name} "
                        f"on {use.stream} may still work on it"
                    )
                    if after is not None:
                        _spoil(after)

    def _memory(self, tensor: Tensor) -> _Memory | None:
        return self._memories.get(tensor.untyped_storage()._cdata)

    def _remember(
        self, tensor: Tensor, device: torch.device, home: FakeStream | None, written: Launch | None = None
    ) -> _Memory:
        storage = tensor.untyped_storage()
        memory = _Memory(StorageWeakRef(storage), tensor.dtype, device, home, written)
        # The weak reference keeps the key from being reused for another storage.
        self._memories[storage._cdata] = memory
        return memory


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation modifies."""
    result = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            result += _tensors(args[k] if k < len(args) else kwargs.get(argument.name))
    return result


def _reads(func: Any) -> bool:
    """Return whether an operation reads the elements of its arguments, and not only their shapes."""
    name: str = func.overloadpacket.__name__
    return not name.startswith("new_") and not name.endswith("_like")


def _pending(launch: Launch | None, stream: FakeStream) -> bool:
    """Return whether ``stream`` has not waited for ``launch``."""
    return launch is not None and stream.seen.get(launch.stream, 0) < launch.tick


def _by(memory: _Memory) -> str:
    return f"{memory.written.name} on {memory.written.stream} has written" if memory.written else "was there before"


def _wrong(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, _wrong_value(tensor.dtype))


def _wrong_value(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _exchange(tree: Any, stale: dict[int, Tensor]) -> Any:
    return tree_map_only(Tensor, lambda tensor: stale.get(id(tensor), tensor), tree) if stale else tree


def _spoil(memory: _Memory) -> None:
    """Make the contents wrong, and everything computed from them."""
    seen = set()
    pending = [memory]
    with _disable_current_modes():
        while pending:
            memory = pending.pop()
            if memory in seen:
                continue
            seen.add(memory)
            pending += [after for _, after in memory.uses if after is not None]
            storage = torch.UntypedStorage._new_with_weak_ptr(memory.ref.cdata)
            if storage is not None:
                contents = torch.empty(0, dtype=memory.dtype, device="cpu").set_(storage)
                contents.fill_(_wrong_value(memory.dtype))


@contextmanager
def on_fake_devices(*models: nn.Module) -> Iterator[FakeAccelerator]:
    """Run pipelines on ``'cpu:0'``, ``'cpu:1'``, ... on a fake accelerator, forward and backward::

        model = GPipe(layers, balance=[1, 1], devices=["cpu:0", "cpu:1"], chunks=4)
        with on_fake_devices(model):
            model(input).sum().backward()

    Args:
        *models: pipelines, or modules that contain pipelines

    Raises:
        AssertionError: a rule was broken.
    """
    accelerator = FakeAccelerator()
    pipelines = [module for model in models for module in model.modules() if isinstance(module, GPipe)]
    mechanisms = [pipeline._mechanisms for pipeline in pipelines]
    for pipeline in pipelines:
        for partition, device in zip(pipeline.partitions, pipeline.devices, strict=True):
            for tensor in (*partition.parameters(), *partition.buffers()):
                accelerator.place(tensor, device)
        pipeline._mechanisms = replace(pipeline._mechanisms, streams=accelerator.streams)
    try:
        with accelerator:
            yield accelerator
    finally:
        for pipeline, previous in zip(pipelines, mechanisms, strict=True):
            pipeline._mechanisms = previous
    assert not accelerator.hazards, "\n".join(accelerator.hazards)
