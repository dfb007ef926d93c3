"""Each argument of a plan is respected, and each wrong one is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.balancing.planning.models import WIDTH, Residual, mlp, quick, wide
from torchgpipe import GPipe, MicroBatches
from torchgpipe_balancing import DoesNotFit
from torchgpipe_balancing.planning.candidates import default_chunks

WINDOW = MicroBatches([torch.zeros(1, WIDTH), torch.zeros(3, WIDTH)])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, "batch must be a positive whole number, the rows of a mini-batch, but got 0"),
        ({"batch": 2.5}, "batch must be a positive whole number"),
        ({"margin": 1.0}, "margin must be a share of the memory from 0 to below 1, but got 1.0"),
        ({"memory": [1e9]}, "memory has 1 numbers, one for each device, but there are 2 devices"),
        ({"memory": [1e9, 0]}, "memory must have positive numbers of bytes"),
        ({"memory": [1e9, float("nan")]}, "memory must have positive numbers of bytes"),
        ({"memory": []}, "memory has 0 numbers"),
        ({"memory": ["14GiB", "much"]}, "a text such as '14GiB' or '14 GB', but got 'much'"),
        ({"devices": []}, "there are 0 devices"),
        ({"devices": ["cpu:0", "cpu:0"]}, "each device must be there once, but got"),
        ({"devices": [f"cpu:{k}" for k in range(7)]}, "6 layers that can be kept apart, fewer than the 7 devices"),
        ({"speeds": [1.0, 0.0]}, "speeds must have a positive number for each of 2 devices"),
        ({"bandwidth": 0.0}, "bandwidth must be a positive number of bytes a second, but got 0.0"),
        ({"seconds": -1.0}, "seconds must be 0 or more, but got -1.0"),
        ({"schedule": []}, "schedule must name at least one of"),
        ({"schedule": "gpipe"}, "gpipe"),
        ({"schedule": [lambda m, n: []]}, "a plan tries schedules by name"),
        ({"chunks": 0}, "chunks must be numbers from 1 to the 16 rows of a mini-batch, but got 0"),
        ({"chunks": [2, 17]}, "chunks must be numbers from 1 to the 16 rows"),
        ({"chunks": 2.5}, "chunks must be numbers from 1"),
        ({"sample": torch.tensor(1.0)}, "the sample has no rows: no tensor in it has a dimension 0 to split"),
        ({"sample": torch.empty(0, WIDTH)}, "the sample has no rows"),
        ({"batch": WINDOW}, "a plan is for mini-batches that are split; for MicroBatches, plan with a sample like one"),
        ({"batch": 3, "sample": WINDOW}, "a plan is for mini-batches that are split"),
        ({"batch": [3, 4]}, r"batch must be a positive whole number, the rows of a mini-batch, but got \[3, 4\]"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0][:40],
)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(mlp(), **wrong)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (len, {}, "model must be an nn.Module, but is builtin_function_or_method"),
        (GPipe(mlp(2), [2], devices=["cpu"]), {}, r"call unwrap\(\) first"),
        (mlp(), {"optimizer": "AdamW"}, "optimizer must be a class such as"),
        (mlp(), {"ballance": [3, 3]}, "ballance"),
        (Residual(), {"ballance": [3, 3]}, "ballance"),
        (mlp(), {"balance": [3, 3]}, "a plan decides on balance, which cannot be given"),
        (Residual(), {"partitions": 2}, "a plan decides on partitions, which cannot be given"),
        (mlp(), {"memory": "14GiB"}, "memory must be a list with the bytes of each device, .* but got '14GiB'"),
    ],
)
def test_a_wrong_type_or_name_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quick(model, **options)


def test_schedules_and_chunks_are_those_that_were_asked_for() -> None:
    plan = quick(mlp(), schedule=["GPipe", "V-Half"], chunks=[8, 2, 2])
    assert {(one.schedule, one.chunks) for one in plan.fitting} == {*product(("GPipe", "V-Half"), (2, 8))}


@pytest.mark.parametrize(
    ("batch", "n", "counts"),
    [(64, 2, (2, 4, 8, 16, 32)), (64, 3, (4, 8, 16, 32, 64)), (5, 2, (2, 4)), (16, 1, (1, 2, 4, 8, 16)), (2, 4, (2,))],
)
def test_default_numbers_of_micro_batches(batch: int, n: int, counts: tuple[int, ...]) -> None:
    assert default_chunks(batch, n) == counts


def test_nothing_is_recomputed_without_checkpoints() -> None:
    model = wide().to("meta")  # Without times, which would decide on another balance from run to run.
    needs = quick(model, checkpoint=False, memory=[1e9, 1e9]).best.memory
    tight = {"memory": [0.9 * max(needs)] * 2, "margin": 0.0}
    assert quick(model, **tight).recomputed
    with pytest.raises(DoesNotFit, match="nothing recomputed"):
        quick(model, checkpoint=False, **tight)


@pytest.mark.parametrize(
    ("memory", "margin", "usable"),
    [([10_000, 20_000], 0.25, [7500, 15_000]), (["1.5 MiB", "2gb"], 0.0, [1.5 * 2**20, 2e9])],
)
def test_memory_may_be_told_in_words_and_a_margin_stays_free(memory: Any, margin: float, usable: list[float]) -> None:
    plan = quick(mlp().to("meta"), memory=memory, margin=margin)
    assert [device.memory for device in plan.input.devices] == usable


def test_a_slow_device_gets_less() -> None:
    model = mlp(8).to("meta")
    assert quick(model, speeds=[1, 3]).balance == quick(model, speeds=[0.5, 1.5]).balance == [2, 6]
    first, second = quick(model, speeds=[3, 1]).balance
    assert first > second


def test_a_transfer_takes_what_the_bandwidth_says() -> None:
    quickly, slowly = (quick(mlp(), bandwidth=number).input.costs for number in (1e12, 10.0))
    assert (quickly.per_byte, slowly.per_byte) == (1e-12, 0.1)


def test_memory_alone_says_how_many_devices() -> None:
    plan = quick(mlp().to("meta"), devices=None, memory=[1e6] * 3)
    assert [device.name for device in plan.input.devices] == ["cpu:0", "cpu:1", "cpu:2"]


def test_batch_norms_get_two_rows_or_more() -> None:
    model = mlp()
    model.insert(1, nn.BatchNorm1d(WIDTH))
    plan = quick(model, batch=9, chunks=None)  # 4 micro-batches have 3 rows each; 8 have 2 rows, and the last has 1.
    assert {one.chunks for one in plan.fitting} == {2, 4}
