"""Frozen packed weights in host memory: their bytes and the tensors among their attributes come and go together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import torchgpipe
from tests.conftest import Devices
from tests.offload.test_offload import devices, equal, gradients, is_empty, transfers, transfers_are_counted
from torchgpipe import GPipe
from torchgpipe.front.pipelined import pipelined_apart
from torchgpipe.offload.verify import verify_home

__all__ = ["devices", "transfers_are_counted"]  # fixtures

pytestmark = pytest.mark.on_late


class State:
    """What a packed weight is unpacked with."""

    __slots__ = ("code", "inner", "scales")

    def __init__(self, scales: Tensor, inner: State | None = None) -> None:
        self.scales, self.inner = scales, inner
        self.code = (torch.tensor([0.0, 0.5]).to(scales), "nf1")


class PackedParameter(nn.Parameter):
    """A parameter with a state, its own bytes under another name, and the module that it belongs to."""

    state: Any
    same: Any
    module: Any


class Packed(nn.Module):
    """A layer of one bit a weight, frozen, with a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        bits = torch.randint(2, (4, 4), dtype=torch.uint8)
        self.weight = PackedParameter(bits, requires_grad=False)
        self.weight.same = self.weight.data
        self.weight.module = self
        self.weight.state = self.state = State(torch.rand(4), State(torch.rand(4)))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, PackedParameter)
        bits, state = self.weight.same, self.weight.state
        return x @ (state.code[0][bits.long()] * state.scales * state.inner.scales) + self.bias


#: The bits of a layer, its scales, its inner scales, two codes, and its bias.
PACKED, BIAS = 16 + 4 * (4 + 4 + 2 + 2), 16


class Twice(nn.Sequential):
    """Layers that are called again, then on the device of the last."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self, *self]:
            x = layer(x)
        return x


def pair(front: str, places: list[str], kind: type[nn.Sequential] = nn.Sequential) -> tuple[Any, Any]:
    """Return a model resident, and in host memory."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind(*[Packed() for _ in range(6)]))
    options: Any = {"chunks": 2, "schedule": "LayerMajor", "loss_fn": functional.mse_loss}
    there = [places[j % len(places)] for j in range(6)]
    if front == "GPipe":
        resident: Any = GPipe(models[0], [1] * 6, devices=there, **options)
        return resident, GPipe(models[1], [1] * 6, devices=places, offload=True, **options)
    options |= {"partitions": 6, "devices": places}
    # In the proof, each operation on weights is watched.
    return (
        pipelined_apart(models[0], torch.randn(2, 4), checkpoint=True, **options),
        torchgpipe.pipelined(models[1], torch.randn(2, 4), offload=True, **options),
    )


@pytest.mark.parametrize("front", ["GPipe", "pipelined"])
def test_the_state_of_a_packed_weight_comes_and_goes_with_it(devices: Devices, front: str) -> None:
    resident, model = pair(front, list(dict.fromkeys(devices(2))))
    moved, before = transfers(model), [one.weight.state for one in model.modules() if isinstance(one, Packed)]
    for _ in range(3):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        bytes, uploads = moved.bytes_up, moved.uploads
        losses = [one.step(x, y) if front == "GPipe" else one.step(x, target=y) for one in (model, resident)]
        assert equal([losses[0], *gradients(model)], [losses[1], *gradients(resident)])
        assert moved.bytes_up - bytes == (moved.uploads - uploads) * (PACKED + BIAS)
        with torch.no_grad():
            assert equal([model(x)], [resident(x)])
        assert is_empty(model) and set(moved.peaks.values()) == {2 * (PACKED + BIAS)}
        for one in (model, resident):  # Changed between two steps.
            next(part for part in one.modules() if isinstance(part, Packed)).weight.state.scales.mul_(2)
    now = [one.weight.state for one in model.modules() if isinstance(one, Packed)]
    assert all(a is b and a.scales.device.type == "cpu" for a, b in zip(before, now, strict=True))


def test_the_state_of_a_packed_weight_is_on_each_device_that_its_layer_runs_on(devices: Devices) -> None:
    """Resident as well, its scales stayed on the first: 'Expected all tensors to be on the same device'."""
    models = pair("pipelined", list(dict.fromkeys(devices(2))), Twice)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    assert equal(*[[model.step(x, target=y), *gradients(model)] for model in models])
    for model in models:
        first, second = model(x), model(y)
        first.sum().backward()
        second.sum().backward()
    assert equal(*map(gradients, models))


def test_what_cannot_come_and_go_is_refused() -> None:
    """A gradient of a scale would arrive at the copy on the device; a class that wraps tensors has them elsewhere."""
    scaled = PackedParameter(torch.zeros(1), requires_grad=False)
    scaled.state = State(torch.zeros(1, requires_grad=True))
    wrapping = nn.Parameter(TwoTensor(torch.zeros(1), torch.zeros(1)), requires_grad=False)
    for parameter, text in ((scaled, "'w' has a Tensor"), (wrapping, "'w' is a TwoTensor")):
        with pytest.raises(ValueError, match=text + r".*requires_grad_\(False\).*load_in_4bit=True.*more devices"):
            verify_home([("w", parameter)])
