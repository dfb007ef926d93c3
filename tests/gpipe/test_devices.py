"""The `devices` argument: defaults, repeated devices, and too few accelerators."""

from __future__ import annotations

import ast
import copy
import re

import pytest
import torch

from tests.accelerator import DEVICE, needs_accelerator
from tests.conftest import with_accelerators
from tests.gpipe.helpers import make_input, make_model
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import GPipe


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the default is the accelerators")
def test_without_an_accelerator_every_partition_is_on_the_cpu() -> None:
    model = GPipe(make_model(3), [1, 1, 1])
    assert model.devices == [torch.device("cpu")] * 3


def test_devices_is_a_list_with_a_device_for_each_partition() -> None:
    model = GPipe(make_model(3), [1, 2], devices=("cpu:0", torch.device("cpu:1")))
    assert model.devices == [torch.device("cpu:0"), torch.device("cpu:1")]
    assert isinstance(model.devices, list)


def test_devices_may_come_from_a_generator() -> None:
    model = GPipe(make_model(2), [1, 1], devices=(f"cpu:{j}" for j in range(2)))
    assert model.devices == [torch.device("cpu:0"), torch.device("cpu:1")]


def test_more_devices_than_partitions_are_left_alone() -> None:
    assert GPipe(make_model(2), [2], devices=["cpu:0", "cpu:1", "cuda:7"]).devices == [torch.device("cpu:0")]


@pytest.mark.parametrize(("accelerators", "shared"), [(1, [0, 0, 0, 0, 0]), (2, [0, 0, 0, 1, 1]), (4, [0, 0, 1, 2, 3])])
def test_too_few_accelerators_and_the_list_that_shares_them(
    monkeypatch: pytest.MonkeyPatch, accelerators: int, shared: list[int]
) -> None:
    with_accelerators(monkeypatch, accelerators)
    with pytest.raises(IndexError, match="too few devices to hold given partitions") as caught:
        GPipe(make_model(5), [1] * 5)
    found = re.search(r"devices=(\[.*?\])", str(caught.value))
    assert found is not None
    devices = ast.literal_eval(found[1])
    assert devices == [f"cpu:{index}" for index in shared]
    assert GPipe(make_model(5), [1] * 5, devices=devices)(make_input()).shape == (6, 2)


@pytest.mark.parametrize("order", [["cpu", "cpu", "cpu"], ["cpu:0", "cpu:1", "cpu:0"], ["cpu:1", "cpu:1", "cpu:0"]])
def test_a_device_may_repeat(order: list[str], checkpoint: str) -> None:
    module, x = make_model(3), make_input()
    model = GPipe(copy.deepcopy(module), [1, 1, 1], devices=order, chunks=3, checkpoint=checkpoint)
    assert_same(outcome(model, x), plain_outcome(module, x, chunks=3))


@needs_accelerator
def test_input_on_another_device_is_copied_to_the_first() -> None:
    model = GPipe(make_model(2), [1, 1], devices=[DEVICE, "cpu"], chunks=2)
    x = make_input()
    output = model(x)
    assert output.device == torch.device("cpu")
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.device == x.device
