"""A plan runs a copy of the model, with any number of rows, and leaves the caller's model and sample alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests.balancing.planning.models import WIDTH, Residual, mlp
from torchgpipe.spine import arrange
from torchgpipe_balancing.planning.model_under_test import Config, ModelUnderTest

CPUS = [torch.device("cpu", k) for k in range(2)]


class Model(nn.Module):
    """Takes a table first, which has as many rows as the sample or one, and a list of targets."""

    def __init__(self, table_rows: int = 4) -> None:
        super().__init__()
        self.table_rows = table_rows
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

    def forward(self, table: Tensor, x: Tensor, y: Tensor, targets: list[Tensor]) -> Tensor:
        assert len(table) == self.table_rows and len(x) == len(y) == len(targets)
        for layer in self.layers:
            x = layer(x).relu()
        return x * y * torch.stack(targets) + table.sum()


def sample(table_rows: int = 4) -> tuple[Any, ...]:
    return torch.ones(table_rows, 1), torch.randn(4, 3), torch.randn(4, 3), list(torch.randn(4, 1))


def configs(devices: list[torch.device]) -> list[Config]:
    return [
        Config([1, 3], devices, 2),
        Config([3, 1], devices, 2),
        Config([1] * 4, [*devices, *devices[::-1]], 2, "V-Half"),
    ]


@pytest.mark.parametrize("table_rows", [4, 1])
def test_other_numbers_of_rows_change_what_is_split_and_nothing_else(table_rows: int) -> None:
    tested = ModelUnderTest(Model(table_rows), sample(table_rows), None, 2, {"no_chunk": ["table"]})

    assert tested.rows == 4
    for rows in (1, 3, 10):
        tested.plain(rows)
        for config in configs(CPUS):
            _, step = tested.pipeline(config)
            step(rows * 2)


def test_the_sample_runs_before_the_copy_is_spread_over_devices_and_not_again(monkeypatch: Any) -> None:
    tested = ModelUnderTest(Model(), sample(), None, 2, {"no_chunk": ["table"]})
    monkeypatch.setattr(arrange, "study", lambda *_, **__: pytest.fail("on several devices the model cannot run"))

    for config in configs(CPUS):
        tested.pipeline(config)


@pytest.mark.parametrize("is_sequential", [True, False])
def test_nothing_reaches_the_graph_of_the_sample(is_sequential: bool) -> None:
    leaf = torch.randn(4, WIDTH, requires_grad=True)
    model = mlp(4) if is_sequential else Residual(3)
    tested = ModelUnderTest(model, leaf * 2, None, 2, {})
    for _ in range(2):
        _, step = tested.pipeline(Config([2, 2], CPUS, 2))
        step(4)

    assert leaf.grad is None


@pytest.mark.parametrize("layers", [2, 3])
def test_fewer_parts_than_the_schedules_with_two_partitions_a_device_want(layers: int) -> None:
    """The plan of a model of n to 2n - 1 parts for n devices was refused, for schedules that it need not take."""

    model = Residual(layers - 1)
    plan = torchgpipe.plan(model, torch.randn(4, WIDTH), batch=8, devices=["cpu:0", "cpu:1"], seconds=0, trials=0)
    assert sum(plan.balance) == layers
    assert plan.apply(model).layout.balance == plan.balance


def test_what_is_only_measured_is_not_proved(monkeypatch: Any) -> None:
    proofs: list[nn.Module] = []
    monkeypatch.setattr("torchgpipe.front.pipelined._prove", lambda runs, *_, **__: proofs.append(runs.module))
    model = Model()
    plan = torchgpipe.plan(
        model, sample(), batch=8, devices=["cpu:0", "cpu:1"], seconds=0, trials=0, no_chunk=["table"]
    )
    assert not proofs
    assert plan.apply(model) is model
    assert proofs == [model]
