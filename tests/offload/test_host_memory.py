"""Memory of the host is pinned where it lies: once, within a budget, and as long as it lives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import DEVICE, LATE
from torchgpipe.offload.host_memory import HostMemory, _Pins


class Runtime:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, bytes: int, flags: int) -> int:
        self.calls.append(("pinned", bytes))
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.calls.append(("unpinned", 0))


def test_memory_is_pinned_once_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pins = _Pins(100)
    first, second, third = (nn.Parameter(torch.zeros(size)) for size in (20, 10, 5))
    for parameter in (first, first, second, third):
        pins.pin(parameter)
    assert runtime.calls == [("pinned", 80), ("pinned", 20)], "40 bytes were left out"
    first.data = torch.zeros(1)
    gc.collect()
    assert runtime.calls[2:] == [("unpinned", 0)]
    pins.pin(first)
    assert runtime.calls[3:] == [("pinned", 4)]


@pytest.mark.parametrize(("pin", "pinned"), [(80, [80]), ((80, 0), [80]), ((0, 40), [40]), ((80, 40), [80, 40])])
def test_a_budget_is_for_all_devices_together_or_for_each(
    pin: Any, pinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    pins = HostMemory(devices, 2, pin)._pins
    weights = [torch.zeros(20), torch.zeros(10)]
    for device, weight in zip(devices, weights):
        pins[device].pin(weight)
    assert [bytes for _, bytes in runtime.calls] == pinned


def test_without_sysconf_nothing_is_pinned_unless_pin_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has none, and the first upload raised an AttributeError there."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.delattr("os.sysconf", raising=False)
    weight = torch.zeros(20)
    _Pins(None).pin(weight)
    assert not runtime.calls
    _Pins(80).pin(weight)
    assert runtime.calls == [("pinned", 80)]


@pytest.mark.cuda
@pytest.mark.skipif(LATE or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [0, 1 << 20])
def test_memory_that_cannot_be_pinned_leaves_no_error_behind(size: int) -> None:
    """CUDA kept the error, and the next kernel of the thread raised it: "invalid argument"."""
    memory = torch.zeros(size)
    if size:  # Half of it is pinned, and so the whole cannot be.
        torch.cuda.cudart().cudaHostRegister(memory[size // 2 :].data_ptr(), 2 * size, 0)  # type: ignore[no-untyped-call]
    _Pins(None).pin(memory)
    assert (torch.ones(1, device=DEVICE) + 1).item() == 2
    if size:
        torch.cuda.cudart().cudaHostUnregister(memory[size // 2 :].data_ptr())  # type: ignore[no-untyped-call]
