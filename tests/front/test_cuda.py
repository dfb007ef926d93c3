"""Pipelined models on a GPU, with the CPU as another device: waits, copies, and the engine's queues.

The autograd engine has one thread for each device. A backward that waited in it for another cell would hang, which
the CPU does not show; so each test has a time limit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.accelerator import DEVICE, LATE, NEEDS_ACCELERATOR
from tests.front.models import batch, decoder, expect_plain, sample_of
from torchgpipe import pipelined

pytestmark = [
    *NEEDS_ACCELERATOR,
    pytest.mark.timeout(60),
]

GPU = DEVICE
DEVICES = [[GPU], [GPU, GPU], [GPU, "cpu"], ["cpu", GPU], [GPU, "cpu", GPU], ["cpu", GPU, "cpu"]]
if LATE:
    DEVICES = [["cpu", GPU], [GPU, "late:1", "late:2", "late:3"]]
every_devices = pytest.mark.parametrize("devices", DEVICES, ids=lambda devices: "-".join(devices))


@every_devices
@pytest.mark.parametrize(
    ("schedule", "recomputes"), [("GPipe", True), ("1F1B", False), ("1F1B", True), ("ZeroBubble", False)]
)
def test_gradients(devices: list[str], schedule: str, recomputes: bool) -> None:
    if len(set(devices)) < len(devices) > 2 and schedule != "GPipe":
        pytest.skip("partitions that return to a device want GPipe here")
    model, data = decoder(), batch()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"schedule": schedule, "checkpoint": recomputes, "balance": "parameters"}
    pipelined(model, sample_of(data), chunks=3, devices=devices, **options)
    assert model(**data)["logits"].device == torch.device(devices[-1])
    for _ in range(1 if LATE else 3):
        expect_plain(model, plain, data, tolerance=1e-8)


@every_devices
def test_dropout_is_the_same_for_any_number_of_partitions(devices: list[str]) -> None:
    if "cpu" in devices:
        pytest.skip("the CPU draws other numbers")
    schedule: Any = "1F1B" if len({*devices}) in (1, len(devices)) else "GPipe"
    losses = []
    data = batch()
    for places in ([GPU], devices):
        torch.manual_seed(3)
        model = decoder(dropout=0.5)
        pipelined(model, sample_of(data), chunks=3, devices=places, schedule=schedule, balance="size")
        torch.manual_seed(4)
        losses.append([model.step(**data).item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize("devices", [[GPU, "cpu"], ["cpu", GPU]])
def test_without_grad_and_in_one_piece(devices: list[str]) -> None:
    model, data = decoder(), batch()
    plain = copy.deepcopy(model)
    pipelined(model, sample_of(data), chunks=3, devices=devices)
    with torch.no_grad():
        expected = plain(data["ids"])["logits"]
        torch.testing.assert_close(model(data["ids"])["logits"].cpu(), expected)
        model._torchgpipe.study.splitter.rows_of = lambda arguments: 0
        with pytest.warns(UserWarning, match="in one piece"):
            torch.testing.assert_close(model(data["ids"])["logits"].cpu(), expected)
