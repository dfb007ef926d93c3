"""Count the bytes of the tensors alive during one step.

On the CPU PyTorch's own allocator is asked to report: `FLAGS_caffe2_report_cpu_memory_usage`, a switch in
libc10, makes it write one line for each block that it hands out or takes back, with the bytes in use after
it. Every CPU tensor's memory comes from it, whatever thread asks, and nothing is patched: each peer runs
as it is. The profiler's memory events and a TorchDispatchMode would see one thread only, and the original
computes in a worker thread. The lines go to stderr, which is a file for the time of a step. What
libraries such as oneDNN use inside an operation is not a tensor and not counted. The switch is found
under this name where PyTorch was built as its Linux wheels are.

On a GPU the same figure is read from `torch.accelerator.max_memory_allocated`.

A figure is above the level at rest: parameters, buffers, the input, and gradients where they are
present before the step.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

LINE = re.compile(rb"C10 (alloc|deleted) (\d+) bytes, total alloc (\d+) bytes")


class Reports:
    """The CPU allocator's reports of one step."""

    def __init__(self) -> None:
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        self._flags = ctypes.CDLL(str(library))
        self._flag("FLAGS_caffe2_report_cpu_memory_usage", ctypes.c_bool).value = True

    def _flag(self, name: str, kind: type[ctypes.c_bool] | type[ctypes.c_int]) -> ctypes.c_bool | ctypes.c_int:
        return kind.in_dll(self._flags, name)

    @contextmanager
    def written_to(self, path: str) -> Iterator[None]:
        """Let the allocator write its lines, and send stderr to a file."""
        level = self._flag("FLAGS_caffe2_log_level", ctypes.c_int)
        quiet = level.value
        stderr = os.dup(2)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 2)
        level.value = 0  # INFO
        try:
            yield
        finally:
            level.value = quiet
            os.dup2(stderr, 2)
            os.close(stderr)
            os.close(file)

    def peak(self, run: Callable[[], object]) -> int:
        """Return the most bytes in use while ``run`` runs, above the level at rest."""
        with tempfile.NamedTemporaryFile() as file:
            with self.written_to(file.name):
                run()
            lines = _lines(Path(file.name).read_bytes())
        return max(total for _, _, total in lines) - _rest(lines)


def _rest(lines: list[tuple[bytes, int, int]]) -> int:
    """Return the level at rest, from the first line: the bytes in use after it, less what it changed."""
    kind, size, total = lines[0]
    return total - size if kind == b"alloc" else total + size


def _lines(report: bytes) -> list[tuple[bytes, int, int]]:
    return [(kind, int(size), int(total)) for kind, size, total in LINE.findall(report)]


def _peaks_on_gpus(run: Callable[[], object], devices: Sequence[torch.device]) -> list[int]:
    """Return the same for each GPU."""
    for device in devices:
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
    rest = [torch.accelerator.memory_allocated(device) for device in devices]
    run()
    for device in devices:
        torch.accelerator.synchronize(device)
    return [torch.accelerator.max_memory_allocated(device) - low for device, low in zip(devices, rest, strict=True)]


@cache
def reports() -> Reports:
    """Return the CPU allocator's reports. Call it before anything is made that a counted step will free."""
    return Reports()


def memories(devices: Iterable[str | torch.device]) -> list[torch.device]:
    """Return the devices that have a memory of their own. CPU devices share one, which beside GPUs is not counted."""
    places = [torch.device(device) for device in devices]
    gpus = list(dict.fromkeys(device for device in places if device.type != "cpu"))
    return gpus or [torch.device("cpu")]


def peaks_of(run: Callable[[], object], places: Sequence[torch.device]) -> list[int]:
    """Return the most bytes in use while ``run`` runs, above the level at rest, in each of these memories."""
    gc.collect()
    return [reports().peak(run)] if places[0].type == "cpu" else _peaks_on_gpus(run, places)
