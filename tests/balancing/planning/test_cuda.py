"""Plans for a GPU, by itself and beside the CPU: measured, checked by its allocator, applied, and released."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe
from tests.accelerator import DEVICE, LATE, NEEDS_ACCELERATOR, backend
from tests.balancing.planning.models import Residual, wide

pytestmark = [
    *NEEDS_ACCELERATOR,
    pytest.mark.timeout(60),
]

GPU = DEVICE
#: On `late`, where the CPU computes, plans are small and few pipelines are tried.
WIDTH, BATCH, LARGE = (256, 64, 4096) if not LATE else (32, 16, 16)
OPTIONS: dict[str, Any] = (
    {"seconds": 0.1} if not LATE else {"seconds": 0.0, "chunks": 2, "schedule": "1F1B", "trials": 1}
)


def allocated() -> int:
    """Return the bytes of tensors. Of a GPU, cuBLAS has a workspace of some 33 MiB for each thread and stream, too."""
    gc.collect()
    if not LATE:
        backend.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    allocated: int = backend.memory_allocated()
    return allocated


@pytest.mark.parametrize("devices", [[GPU, "late:1"]] if LATE else [[GPU], [GPU, "cpu"], ["cpu", GPU]], ids="-".join)
@pytest.mark.parametrize("make", [Residual] if LATE else [wide, Residual])
def test_a_plan_for_a_gpu(make: Any, devices: list[str]) -> None:
    model: nn.Module = make(6, WIDTH)
    before = allocated()
    sample, options = torch.randn(8, WIDTH), {**OPTIONS, "speeds": [1] * len(devices)}
    plan = torchgpipe.plan(model, sample, batch=BATCH, devices=devices, optimizer=torch.optim.AdamW, **options)
    check = plan.check(model)

    assert allocated() == before
    assert plan.seconds > 0 and check.seconds > 0
    assert (plan.input.costs.latency > 0) == (len(devices) > 1)
    assert plan.input.devices[devices.index(GPU)].memory > 2**28
    assert check.devices == tuple(device for device in devices if device != "cpu")
    for predicted, measured in zip(check.predicted_bytes, check.measured_bytes, strict=True):
        # Workspaces of libraries are not planned for: 33 MiB for each thread and stream that multiplied matrices.
        assert 0 < measured - before < 2 * predicted + 2**27
    model = plan.apply(model, loss_fn=lambda output, _: output.float().mean())
    assert model.step(torch.randn(BATCH, WIDTH)).isfinite()


def test_memory_runs_out_while_a_model_is_measured() -> None:
    rest = backend.mem_get_info()[0] // 2**20 - 64
    filler = torch.empty(max(1, rest) * 2**20, dtype=torch.uint8, device=GPU)
    try:
        with pytest.raises((torch.OutOfMemoryError, MemoryError)):
            torchgpipe.plan(wide(6, 2048), torch.randn(8, 2048), batch=LARGE, devices=[GPU], **{**OPTIONS, "chunks": 1})
    finally:
        del filler
        backend.empty_cache()  # The cache is not for the libraries, which could not even start in another thread.
