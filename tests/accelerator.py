"""The accelerator of the tests: GPUs, or in a run with ``--late`` those of `tests.late`, which any machine has.

What is marked cuda and late runs on both, on the devices that are named here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import late

__all__ = ["DEVICE", "KIND", "LATE", "NEEDS_ACCELERATOR", "backend", "be_slow", "is_there", "needs_accelerator"]

#: Whether this run is one on `late`. Its kernels are the CPU's, so tests are smaller there, and take more devices.
LATE = late.loaded()

#: The type of the accelerators.
KIND = "late" if LATE else "cuda"

#: The first accelerator, which is the only one on many machines.
DEVICE = f"{KIND}:0"

#: ``torch.cuda``, or its like.
backend: Any = torch.get_device_module(KIND)

#: The marks of a file whose tests run on a GPU and on `late`.
NEEDS_ACCELERATOR = [
    pytest.mark.cuda,
    pytest.mark.late,
    pytest.mark.skipif(not backend.is_available(), reason="needs a GPU"),
]


def needs_accelerator(test: Any) -> Any:
    """Let a test run on a GPU and on `late`."""
    for mark in NEEDS_ACCELERATOR:
        test = mark(test)
    return test


def is_there(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on an accelerator."""
    return tensor.device.type == KIND


def be_slow(cycles: int = 10_000 if LATE else 4_000_000) -> None:
    """Keep the current stream busy for ``cycles``, by default much longer than the launch of a kernel takes.

    On `late`, which finds races whatever the timing, there is no need to.
    """
    backend._sleep(cycles)
