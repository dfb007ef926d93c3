"""A check runs what was planned, on a copy, and sets each device beside its own prediction."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.balancing.planning.models import Residual, mlp, quick
from torchgpipe_balancing.planning import check, measure, model_under_test
from torchgpipe_balancing.planning.model_under_test import Config


class Block(nn.Module):
    """Has two parts that can be kept apart if partitions are more than blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_are_those_of_the_plan_whatever_schedule_has_won() -> None:
    made = quick(Blocks(), schedule=["1F1B", "Interleaved1F1B"], trials=0)
    few = [one for one in made.fitting if one.schedule == "1F1B"]
    replace(made, fitting=tuple(few)).check(Blocks(), steps=1)


@pytest.mark.parametrize("make", [mlp, Residual])
def test_copies_are_released(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[Any]] = []
    copied = model_under_test._copied

    def watched(model: nn.Module) -> Any:
        made = copied(model)
        copies.extend(map(weakref.ref, made.parameters()))
        return made

    monkeypatch.setattr(model_under_test, "_copied", watched)
    gc.disable()
    try:
        model = make()
        made = quick(model)
        assert copies
        assert not [one for one in copies if one() is not None]
        made.check(model, steps=1)
        assert not [one for one in copies if one() is not None]
    finally:
        gc.enable()


def test_the_quickest_that_ran_comes_first_and_what_ran_out_of_memory_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {"1F1B": 3.0, "V-Half": 2.0}

    class Stub:
        def pipeline(self, way: Config) -> Any:
            if way.schedule == "GPipe":
                raise torch.OutOfMemoryError
            return way.schedule, lambda rows: None

    monkeypatch.setattr(check, "time_steps", lambda run, devices, steps, model: [9.0, *[seconds[model]] * (steps - 1)])
    made = quick(mlp().to("meta"))
    near: list[Any] = [replace(made.best, schedule=name, seconds=1.0) for name in ("GPipe", "1F1B", "V-Half")]
    far = replace(made.best, seconds=1.2)
    ran = check.try_out(Stub(), made.input, [*near, far], 4)  # type: ignore[arg-type]
    assert [(candidate.schedule, candidate.measured) for candidate in ran] == [
        ("V-Half", 2.0),
        ("1F1B", 3.0),
        ("1F1B", 0),
    ]
    assert ran[-1] is far


def test_a_timed_step_begins_when_devices_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(measure, "synchronize", lambda devices: order.append("synchronize"))
    measure.time_steps(lambda: order.append("step"), [], 1)
    assert order == ["synchronize", "step", "synchronize"]
