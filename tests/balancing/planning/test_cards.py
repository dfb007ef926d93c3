"""Cards that differ: each gets what it has memory and time for, and the order is the plan's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchgpipe
from tests.balancing.planning.models import DEVICES, WIDTH, mean, mlp, quick, wide
from torchgpipe_balancing.planning import measure
from torchgpipe_balancing.planning import plan as plan_module
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


class OneThreeTimesAsSlow(Recorded):
    """What steps of layers that are all alike would show if ``cpu:1`` were three times as slow as ``cpu:0``."""

    def run(self, pipeline: Any, *rest: Any) -> None:
        super().run(pipeline, *rest)
        self.seconds = [
            count * (3.0 if device.index else 1.0) for count, device in zip(pipeline.balance, pipeline.devices)
        ]

    def median(self, kind: str, j: int) -> float:
        return self.seconds[j]


@pytest.mark.parametrize("devices", [DEVICES, DEVICES[::-1]])
def test_a_layer_that_was_measured_on_a_slow_card_is_no_slow_layer(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "Recorded", OneThreeTimesAsSlow)
    plan = quick(mlp(8), devices=devices, speeds=[1.0 if device == "cpu:1" else 3.0 for device in devices])
    assert {layer.forward for layer in plan.input.costs.layers_at(4, 0.0)} == {1.0}
    assert dict(zip(map(str, plan.devices), plan.balance)) == {"cpu:0": 6, "cpu:1": 2}


def test_cards_of_several_kinds_need_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "kind_of", lambda device: "slow" if device.index else "quick")
    with pytest.raises(ValueError, match=r"of several kinds, quick, slow: give speeds=, how fast each of .*cpu:0"):
        quick(mlp(8))
    assert quick(mlp(8), speeds=[2.0, 2.0]).balance


def test_with_weights_in_host_memory_a_slow_card_gets_fewer_layers() -> None:
    options: dict[str, Any] = {"batch": 8, "loss_fn": mean, "offload": True, "chunks": 2, "devices": DEVICES}
    slow = torchgpipe.plan(mlp(16), torch.randn(2, WIDTH), memory=["1GiB"] * 2, speeds=[1.0, 0.3], **options)
    assert sum(slow.balance[::2]) > sum(slow.balance[1::2])


def test_transfers_take_what_the_slowest_link_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "same_memory", lambda a, b: False)
    links = {(0, 1): (1e-6, 1e-9), (1, 2): (2e-6, 8e-9), (2, 3): (9e-6, 2e-9)}
    monkeypatch.setattr(measure, "seconds_of_copies", lambda a, b: links[a.index, b.index])
    costs = quick(mlp(), devices=[f"cpu:{k}" for k in range(4)]).input.costs
    assert (costs.latency, costs.per_byte) == (2e-6, 8e-9)
