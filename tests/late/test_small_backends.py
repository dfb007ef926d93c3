"""Backends that offer ``torch.accelerator`` and little more, such as PyTorch's own reference backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests.front.models import Chain
from tests.layers import Apply
from torchgpipe import GPipe, pipelined
from torchgpipe.devices import generators, stream

pytestmark = pytest.mark.late

DEVICES = ["late:1", "late:2"]
MODES = ["always", "except_last", "never"]


def without_streams(patch: pytest.MonkeyPatch) -> None:
    """Let the module have no streams, and the allocator no use for them."""
    for name in ("Stream", "Event", "StreamContext", "stream", "current_stream", "default_stream", "set_stream"):
        patch.delattr(torch.late, name)  # type: ignore[attr-defined]
    patch.setattr(Tensor, "record_stream", None)


def without_generators(patch: pytest.MonkeyPatch) -> None:
    """Let the module have functions for the generator of the current device only."""
    own = torch.late.default_generators  # type: ignore[attr-defined]
    patch.delattr(torch.late, "default_generators")  # type: ignore[attr-defined]
    for name, method in (
        ("get_rng_state", "get_state"),
        ("set_rng_state", "set_state"),
        ("manual_seed", "manual_seed"),
    ):

        def function(*args: Any, method: str = method) -> Any:
            return getattr(own[torch.accelerator.current_device_index()], method)(*args)

        patch.setattr(torch.late, name, function)  # type: ignore[attr-defined]
    patch.setattr(torch.late, "manual_seed_all", lambda seed: [one.manual_seed(seed) for one in own])  # type: ignore[attr-defined]


def without_data(patch: pytest.MonkeyPatch) -> None:
    """Let parameters keep their device."""
    patch.setattr(torch, "_has_compatible_shallow_copy_type", lambda a, b: a.device.type == b.device.type)


def forget() -> None:
    for cached in (
        stream._has_side_streams,
        stream._side_stream,
        generators.device_generator,
        generators.generators_of,
    ):
        cached.cache_clear()  # type: ignore[attr-defined]


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for lack in (without_streams, without_generators, without_data):
        lack(monkeypatch)
    forget()
    yield
    monkeypatch.undo()
    forget()


def noise() -> nn.Module:
    """Return a layer that makes a new tensor, and draws, without a word about the device."""
    return Apply(lambda x: x * (torch.rand(x.shape, device="late") < 0.5))


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("checkpoint", MODES)
def test_the_device_is_current_and_the_mask_of_a_recomputation_the_same(checkpoint: str) -> None:
    layers = nn.Sequential(nn.Dropout(0.5), noise(), nn.Dropout(0.2), noise())
    model = GPipe(layers, [2, 2], devices=DEVICES, chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        x = torch.ones(4, 16, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, y.detach().cpu())


@pytest.mark.usefixtures("lacking")
def test_steps_draw_the_same_on_any_devices() -> None:
    def gradients(devices: list[str], checkpoint: str) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 8), noise(), nn.Linear(8, 8), nn.Dropout(0.5))
        model = GPipe(
            layers, [2, 2], devices=devices, chunks=2, checkpoint=checkpoint, loss_fn=lambda y, _: y.square().mean()
        )
        return [model.step(torch.ones(4, 8)).cpu(), *[p.grad.cpu() for p in model.parameters() if p.grad is not None]]

    expected = gradients(["late:1", "late:1"], "never")
    for checkpoint in MODES:
        torch.testing.assert_close(gradients(DEVICES, checkpoint), expected)


def piped(layers: Chain) -> nn.Module:
    return GPipe(nn.Sequential(*layers.layers), [2, 2], devices=DEVICES, chunks=2)


def any_module(layers: Chain) -> nn.Module:
    return pipelined(layers, torch.ones(2, 4), chunks=2, devices=DEVICES)


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("front", [piped, any_module])
def test_an_optimizer_made_before_trains_the_parameters(front: Callable[[Chain], nn.Module]) -> None:
    torch.manual_seed(0)
    layers = Chain()
    layers(torch.ones(1, 4)).sum().backward()
    parameters = list(layers.parameters())
    parameters[0].mark = "kept"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model = front(layers)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert parameters[0].mark == "kept"  # type: ignore[attr-defined]
    assert all(p.grad is not None and p.grad.device == p.device for p in parameters)
    assert {str(p.device) for p in parameters} == set(DEVICES)
    optimizer.zero_grad()
    model(torch.ones(4, 4)).sum().backward()
    before = [p.detach().cpu() for p in parameters]
    optimizer.step()
    assert not any(torch.equal(p.detach().cpu(), old) for p, old in zip(parameters, before))


def test_a_parameter_that_cannot_move_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without_data(monkeypatch)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers.zero_grad()
    layers(torch.ones(1, 4)).sum().backward()
    reference = weakref.ref(layers[1].bias)
    with pytest.raises(ValueError, match=r"'1.bias' cannot be moved from cpu to late:2 as the same object.*weakref"):
        GPipe(layers, [1, 1], devices=DEVICES)
    assert reference() is layers[1].bias
    assert layers[1].bias.grad is not None


@pytest.mark.usefixtures("lacking")
def test_a_step_is_recorded() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=DEVICES, chunks=2)
    with torchgpipe.record(model) as timeline:
        model(torch.ones(2, 2)).sum().backward()
    assert "copy" in {span.kind for span in timeline.spans}
