"""A pipelined model is recorded as a GPipe is: each cell, copy and wait, where it ran, without changing results."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from tests.conftest import Devices
from tests.faults import Fault, Plan, build, rows
from tests.frames.models import Decoder, batch, gradients
from tests.timeline.test_recorder import cells
from torchgpipe.frames.pipelined import pipelined_apart
from torchgpipe.schedule import program

M, N = 3, 3
GRID = [(i, j) for i in range(M) for j in range(N)]


@pytest.fixture
def data() -> dict[str, Tensor]:
    return batch()


def model_on(devices: list[str], data: dict[str, Tensor], **options: Any) -> Any:
    """Return a model of a column for each device, although several may be equal."""
    sample = {name: tensor[:2] for name, tensor in data.items()}
    return pipelined_apart(Decoder().double(), sample, chunks=M, devices=devices, balance=[2, 3, 2], **options)


def backward_of(schedule: str) -> list[tuple[str, int, int]]:
    """Return the backward cells. The first column has no gradient to pass on, so W does all of its backward."""
    if schedule != "ZeroBubble":
        return [("backward", i, j) for i, j in GRID]
    halves = [("backward of the input", i, j) for i, j in GRID if j]
    return halves + [("backward of the weights", i, j) for i, j in GRID]


def test_the_rows_are_columns_and_the_programs_are_those_that_ran(data: dict[str, Tensor]) -> None:
    sample = {name: tensor[:2] for name, tensor in data.items()}
    devices = ["cpu:0", "cpu:0", "cpu:1"]
    model: Any = torchgpipe.pipelined(Decoder().double(), sample, chunks=M, devices=devices, balance=[1, 3, 3])
    with torchgpipe.record(model) as timeline:
        model(**data)
        model.step(**data)
    spine = tuple(model.layout.spine)
    assert [(str(row.device), row.layers) for row in timeline.partitions] == [
        ("cpu:0", spine[:4]),
        ("cpu:1", spine[4:]),
    ]
    assert [*timeline._programs.values()] == [program("GPipe", M, [0, 1]), program("1F1B", M, [0, 1])]
    assert not timeline.report().take_turns


@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubble"])
def test_every_cell_is_there_once_and_numbers_are_the_same(
    devices: Devices, data: dict[str, Tensor], schedule: Any
) -> None:
    model, results = model_on(devices(N), data, schedule=schedule), []
    for recording in (False, True):
        with torchgpipe.record(nn.ModuleDict({"inner": model})) if recording else nullcontext() as timeline:
            model(**data)["loss"].backward()
            loss = model.step(**data)
            with torch.no_grad():
                model.step(**data)
        results.append([loss, *gradients(model).values()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)

    forward = [("forward", i, j) for i, j in GRID]
    assert cells(timeline.of_step(0)) == Counter(forward + [("backward", i, j) for i, j in GRID])
    assert cells(timeline.of_step(1)) == Counter(forward + backward_of(schedule))
    assert cells(timeline.of_step(2)) == Counter(forward)
    assert not any(span.failed for span in timeline.spans)
    assert {span.kind for span in timeline.spans if not span.computes} == set()
    at = {(span.kind, span.micro_batch, span.partition): span for span in timeline.of_step(0)}
    for i, j in GRID:
        assert at["forward", i, j].end <= at["backward", i, j].start
        if j:
            assert at["forward", i, j - 1].end <= at["forward", i, j].start
            assert at["backward", i, j].end <= at["backward", i, j - 1].start


def test_what_is_recomputed_is_a_part_of_backward(data: dict[str, Tensor]) -> None:
    model = model_on(["cpu"] * N, data, schedule="ZeroBubble", checkpoint=True)
    with torchgpipe.record(model) as timeline:
        model.step(**data)
    assert cells(timeline.spans) == Counter([(kind, i, j) for kind in ("forward", "backward") for i, j in GRID])


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_cell_that_raises_is_marked(devices: Devices, phase: str) -> None:
    plan = Plan()
    model = pipelined_apart(build(plan, N).eval(), rows(M), chunks=M, devices=devices(N), balance=[1] * N)
    plan.add((1, 1), phase)
    with pytest.raises(Fault), torchgpipe.record(model) as timeline:
        model.train()(rows(M)).sum().backward()
    assert [(one.kind, one.micro_batch, one.partition) for one in timeline.spans if one.failed] == [(phase, 1, 1)]


def test_a_column_that_is_passed_by_has_no_cell(devices: Devices) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
            self.skips = False

        def forward(self, input: Tensor) -> Tensor:
            output = self.a(input)
            output = output if self.skips else self.b(output)
            result: Tensor = self.c(output)
            return result

    model = pipelined_apart(Model(), torch.randn(2, 3), chunks=M, devices=devices(N), balance=[1, 1, 1])
    model.skips = True
    with torchgpipe.record(model) as timeline:
        model(torch.randn(6, 3)).sum().backward()
    assert {span.partition for span in timeline.spans} == {0, 2}
