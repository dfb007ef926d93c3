"""The pipeline on several devices with streams: every wait and every record is in its place.

On `late`, a missing one is a race, which fails the test. A superfluous one gives right numbers but removes overlap; see
`test_overlap`. Any layers and skips are in `test_transparency`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layers import Apply
from tests.plain import assert_same, outcome, run_plain
from tests.random_pipelines import MODES
from torchgpipe import GPipe, is_recomputing

pytestmark = pytest.mark.late


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    result: str = request.param
    return result


def pipeline(module: nn.Sequential, balance: list[int], *, devices: list[int] | None = None, **options: Any) -> GPipe:
    """Return a pipeline on devices of these numbers, by default one device per partition."""
    indices = range(len(balance)) if devices is None else devices
    options.setdefault("chunks", 4)
    return GPipe(copy.deepcopy(module), balance, devices=[f"late:{index}" for index in indices], **options)


def linears(n: int, width: int = 3) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n)])


# Results equal those of the plain model.


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Callable[[], Any]) -> None:
    module, x = linears(3), torch.randn(8, 3)
    model = pipeline(module, [1, 1, 1])
    with context():
        torch.testing.assert_close(model(x).cpu(), run_plain(module, x, chunks=4), rtol=0, atol=0)


def test_deferred_batch_norm(mode: str) -> None:
    module, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(8, 3)
    models = [
        pipeline(module, [1, 1, 1], devices=devices, checkpoint=mode, deferred_batch_norm=True)
        for devices in ([0, 0, 0], [0, 1, 2])
    ]
    one_device, several = [outcome(model, x) for model in models]
    assert_same(several, one_device)


@pytest.mark.parametrize("run", ["forward", "step"])
@pytest.mark.parametrize("devices", [[0, 1], [1, 1]], ids=str)
@pytest.mark.parametrize("last", [nn.Identity, lambda: nn.BatchNorm1d(3)], ids=["plain", "norm"])
def test_streams_and_devices_are_current_in_the_layers(
    mode: str, devices: list[int], last: Callable[[], nn.Module], run: str
) -> None:
    def note(phase: str) -> None:
        current = [torch.accelerator.current_stream(j).stream_id for j in range(2)]
        seen.add((phase, f"late:{torch.accelerator.current_device_index()}", *current))

    def forward(x: Tensor) -> Tensor:
        note("recomputation" if is_recomputing() else "forward")
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: note("backward"))
        return x.sin()

    seen: set[tuple[Any, ...]] = set()
    module = nn.Sequential(*[nn.Sequential(Apply(forward), last()) for _ in range(2)])
    options: dict[str, Any] = {
        "checkpoint": mode,
        "chunks": 2,
        "schedule": "GPipe",
        "loss_fn": lambda y, _: y.sum(),
        "reduce": "mean",
    }
    model = pipeline(module, [1, 1], devices=devices, **options)
    x = torch.randn(4, 3, requires_grad=True)
    if run == "step":
        model.step(x)
    else:
        model(x).sum().backward()
    default = [torch.accelerator.current_stream(j).stream_id for j in range(2)]
    assert {phase for phase, *_ in seen} >= {"forward", "backward"}
    assert seen == {(phase, f"late:{j}", *default) for j in devices for phase in {phase for phase, *_ in seen}}


# Lifetimes (`test_leaks` examines single layers)


def allocated() -> int:
    """Return the bytes that are in use on all devices."""
    torch.accelerator.synchronize()
    return sum(torch.accelerator.memory_allocated(index) for index in range(torch.accelerator.device_count()))


def test_without_gradients_only_the_output_is_left_on_the_devices() -> None:
    model, x = pipeline(linears(3), [1, 1, 1]), torch.randn(4, 3)
    before = allocated()
    with torch.no_grad():
        output = model(x)
    assert allocated() - before == nbytes([output])


def test_checkpointing_keeps_what_crosses_the_boundaries() -> None:
    m, n = 4, 3
    model, x = pipeline(linears(n), [1] * n, chunks=m, checkpoint="always"), torch.randn(m, 3, device="late:0")
    for _ in range(2):  # The first recomputations are compared, and keep sums.
        model(x).sum().backward()
    before = allocated()
    output = model(x)
    # The inputs of the first partition are views of the caller's mini-batch.
    assert allocated() - before == (n - 1) * x.nbytes + output.nbytes


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
