"""Cards that differ: each gets what it has memory and time for, and the order is the plan's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchgpipe
from tests.balancing.planning.models import DEVICES, WIDTH, mean, mlp, quick, wide
from torchgpipe_balancing.planning import measure
from torchgpipe_balancing.planning.measure import Recorded


def test_the_card_with_more_memory_comes_first_where_activations_fit_only_there() -> None:
    model = wide().to("meta")
    needs = quick(model, memory=[1e9, 1e9]).best.memory
    assert needs[0] > needs[1]
    plan = quick(model, memory=[needs[1], needs[0]], margin=0.0)
    assert (plan.balance, plan.recomputed) == ([3, 3], [])
    assert [*map(str, plan.devices)] == ["cpu:1", "cpu:0"]
    assert plan.apply(wide()).devices == plan.devices
    assert quick(model, memory=needs, margin=0.0).devices == plan.devices[::-1]


class OnTwoKinds(Recorded):
    """What steps of layers that are all alike would show if ``cpu:1`` were three times as slow as ``cpu:0``."""

    def run(self, pipeline: Any, *rest: Any) -> None:
        super().run(pipeline, *rest)
        self.seconds = [
            count * (3.0 if device.index else 1.0) for count, device in zip(pipeline.balance, pipeline.devices)
        ]

    def mean(self, kind: str, j: int) -> float:
        return self.seconds[j]


@pytest.fixture
def _two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "kind_of", lambda device: "slow" if device.index else "quick")
    monkeypatch.setattr(measure, "Recorded", OnTwoKinds)


@pytest.mark.usefixtures("_two_kinds")
@pytest.mark.parametrize("devices", [DEVICES, DEVICES[::-1]])
def test_a_layer_that_was_measured_on_a_slow_card_is_no_slow_layer(devices: list[str]) -> None:
    plan = quick(mlp(8), devices=devices)
    assert {device.name: device.slowness for device in plan.input.devices} == {"cpu:0": 1.0, "cpu:1": 3.0}
    assert {layer.forward for layer in plan.input.costs.layers_at(4, 4, 0.0)} == {1.0}
    assert dict(zip(map(str, plan.devices), plan.balance)) == {"cpu:0": 6, "cpu:1": 2}
    told = quick(mlp(8), devices=devices, speeds=[2.0, 2.0])
    assert {device.slowness for device in told.input.devices} == {1.0}


def test_with_weights_in_host_memory_a_slow_card_gets_fewer_layers_and_a_small_one_fewer_slots() -> None:
    options: dict[str, Any] = {"batch": 8, "loss_fn": mean, "offload": True, "chunks": 2, "devices": DEVICES}
    small = torchgpipe.plan(mlp(16), torch.randn(2, WIDTH), memory=["3KiB", "1GiB"], **options)
    assert small.slots[0] < small.slots[1]
    assert small.memory[0] <= 0.9 * 3 * 1024
    assert tuple(small.apply(mlp(16))._host_memory.slots.values()) == small.slots
    assert f"{small.slots[0]} and {small.slots[1]} slots" in str(small)
    slow = torchgpipe.plan(mlp(16), torch.randn(2, WIDTH), memory=["1GiB"] * 2, speeds=[1.0, 0.3], **options)
    assert sum(slow.balance[::2]) > sum(slow.balance[1::2])


def test_transfers_take_what_the_slowest_link_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "same_memory", lambda a, b: False)
    links = {(0, 1): (1e-6, 1e-9), (1, 2): (2e-6, 8e-9), (2, 3): (9e-6, 2e-9)}
    monkeypatch.setattr(measure, "seconds_of_copies", lambda a, b: links[a.index, b.index])
    costs = quick(mlp(), devices=[f"cpu:{k}" for k in range(4)]).input.costs
    assert (costs.latency, costs.per_byte) == (2e-6, 8e-9)
