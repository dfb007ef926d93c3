"""Recording on a GPU, whose work runs after its launch: times are those of the work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests.accelerator import DEVICE, needs_accelerator
from tests.layers import Using
from torchgpipe import GPipe

GPU = DEVICE

#: Allowed difference of the host's and the GPU's clocks in seconds: many times the real one, a fraction of `slept`.
APART = 1e-3

CYCLES = 20_000_000


def slow() -> nn.Module:
    """Return a layer that keeps the GPU busy for some milliseconds, while the host goes on at once."""

    def forward(linear: nn.Linear, input: Tensor) -> Tensor:
        if input.is_cuda:
            torch.cuda._sleep(CYCLES)
        return linear(input)

    return Using(forward, width=3)


def slept() -> float:
    """Return the least time in seconds that a slow layer takes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


@pytest.mark.cuda  # `late` keeps no clock of its own, and this is about times.
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("devices", [[GPU, GPU], [GPU, "cpu"], ["cpu", GPU]], ids="-".join)
def test_spans_are_those_of_the_work(devices: list[str], mode: str) -> None:
    model = GPipe(nn.Sequential(slow(), slow()), [1, 1], devices=devices, chunks=3, checkpoint=mode)
    with torchgpipe.record(model) as timeline:
        model(torch.randn(6, 3)).sum().backward()
    assert not any(span.failed for span in timeline.spans)
    forwards = [span for span in timeline.spans if span.kind == "forward"]
    assert len(forwards) == 6
    least = slept() / 2  # The GPU's clock may change.
    for span in forwards:
        if span.device.type == "cuda":
            assert span.seconds > least
    by_cell = {(span.micro_batch, span.partition): span for span in forwards}
    for i in range(3):
        assert by_cell[i, 0].end < by_cell[i, 1].end + APART
    copies = [span for span in timeline.spans if span.kind == "copy"]
    assert len(copies) == (0 if devices == [GPU, GPU] else 6)


@needs_accelerator
def test_peak_memory_is_reported() -> None:
    model = GPipe(nn.Sequential(nn.Linear(3, 3)), [1], devices=[GPU])
    with torchgpipe.record(model) as timeline:
        model(torch.randn(6, 3)).sum().backward()
    (use,) = timeline.report().devices
    assert use.peak_memory is not None
    assert use.peak_memory > 0
