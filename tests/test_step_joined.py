"""Neighbouring partitions on one device are one cell of a step, where that changes nothing but the host's time."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgpipe
from tests.test_step import assert_equal, data, grads_of, mlp, plain_step, stepping
from torchgpipe import GPipe
from torchgpipe.engine import step as engine
from torchgpipe.model.views import Joined
from torchgpipe.schedule import Action, program


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list of the layers in each cell of the last step."""
    found: list[list[int]] = []
    original = engine._MicroBatches.__init__

    def look(self: Any, partitions: Any, *args: Any) -> None:
        found[:] = [[int(name) for name in partition._modules] for partition in partitions]
        original(self, partitions, *args)

    monkeypatch.setattr(engine._MicroBatches, "__init__", look)
    return found


def four(module: nn.Sequential | None = None, **options: Any) -> GPipe:
    options = {"devices": ["cpu:0", "cpu:0", "cpu:0", "cpu:1"], "checkpoint": "never", **options}
    return stepping(module or mlp(), **options)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_neighbours_are_joined(columns: list[list[int]], schedule: str) -> None:
    x, y = data()
    model, plain = four(schedule=schedule), mlp()
    loss = model.step(x, y)
    assert columns == [[0, 1, 2], [3]]
    targets = y.chunk(4)
    order = lambda i, output: F.mse_loss(output, targets[i]) * (2 / 8)  # noqa: E731
    assert torch.equal(loss, plain_step(plain, list(x.chunk(4)), order, schedule).to(loss))
    assert_equal(grads_of(model), grads_of(plain))


def test_what_would_change_is_not_joined(columns: list[list[int]]) -> None:
    x, y = data()
    four(checkpoint="always").step(x, y)
    assert columns == [[0], [1], [2], [3]]
    four(checkpoint=["1"]).step(x, y)  # what is recomputed keeps its own input only
    assert columns == [[0], [1], [2], [3]]
    four(schedule="ZeroBubble").step(x, y)  # a part could not be split because of another one
    assert columns == [[0], [1], [2], [3]]
    model = four()
    model.partitions[1].register_forward_hook(lambda *_: None)
    model.step(x, y)
    assert columns == [[0], [1], [2], [3]]
    model = four()
    with torchgpipe.record(model):
        model.step(x, y)
    assert columns == [[0], [1], [2], [3]]
    shared = mlp()
    shared[2][0].weight = shared[0][0].weight
    four(shared).step(x, y)
    assert columns == [[0], [1], [2], [3]]


def test_a_partition_that_starts_in_place_is_not_joined_to_the_one_before(columns: list[list[int]]) -> None:
    """It runs on a copy of the output of a sigmoid, which the backward of the sigmoid needs."""
    x, y = data()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(6, 6)).double()
    four(layers).step(x, y)
    assert columns == [[0, 1], [2], [3]]


def test_a_program_may_keep_neighbours_apart(columns: list[list[int]]) -> None:
    """Two partitions on one device, each for all micro-batches in turn; then only the first two are joined."""
    x, y = data()
    apart = [
        [Action("F", i, j) for j in (0, 1) for i in range(4)] + [Action("B", i, j) for j in (1, 0) for i in range(4)]
    ]
    reference = stepping(mlp(), ["cpu"] * 2, balance=[2, 2], checkpoint="never")
    loss = reference.step(x, y)
    assert columns == [[0, 1, 2, 3]]
    model = stepping(mlp(), ["cpu"] * 2, balance=[2, 2], checkpoint="never", schedule=apart)
    assert torch.equal(model.step(x, y), loss)
    assert columns == [[0, 1], [2, 3]]
    assert_equal(grads_of(model), grads_of(reference))


class Failing(nn.Module):
    """Fails forward, in the backward of its input, or in a hook on its output."""

    def __init__(self, phase: str, i: int) -> None:
        super().__init__()
        self.phase, self.i, self.runs = phase, i, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs != self.i + 1:
            return x * 1
        if self.phase == "forward":
            raise ArithmeticError
        output = x * 1
        (x if self.phase == "input" else output).register_hook(self._fail)
        return output

    def _fail(self, _: Tensor) -> None:
        raise ArithmeticError


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("phase", ["forward", "input", "output"])
@pytest.mark.parametrize("j", range(4))
def test_errors_name_the_partition(columns: list[list[int]], j: int, phase: str, schedule: str) -> None:
    x, y = data()
    layers = list(mlp())
    layers[j] = nn.Sequential(layers[j], Failing(phase, 2), nn.Identity())
    model = four(nn.Sequential(*layers), schedule=schedule)
    with pytest.raises(ArithmeticError) as info:
        model.step(x, y)
    assert columns == [[0, 1, 2], [3]]
    assert info.value.__notes__[0].startswith(f"micro-batch 2 of 4, partition {j} (layers '{j}'..'{j}') on cpu:")
    assert info.value.__notes__[0].endswith(f"during {'forward' if phase == 'forward' else 'backward'}")


def test_a_value_between_joined_partitions_is_checked(columns: list[list[int]]) -> None:
    x, y = data()

    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x, "name": "x"}

    layers = list(mlp())
    layers[1] = nn.Sequential(layers[1], Named())
    with pytest.raises(TypeError, match=r"'name'.* is str"):
        four(nn.Sequential(*layers)).step(x, y)
    assert columns == [[0, 1, 2], [3]]


def test_layers_may_have_the_names_of_attributes_of_joined_partitions() -> None:
    """These attributes were set behind the layers, and a step raised an error of torch about child modules."""
    names = [name for name in vars(Joined([GPipe(mlp(), [4]).partitions[0]])) if name not in vars(nn.Module())]
    assert {"_at", "_parts"} <= {*names}
    module = nn.Sequential(OrderedDict((name, nn.Linear(6, 6).double()) for name in names))
    x, y = data()
    stepping(module, ["cpu"] * len(names), checkpoint="never").step(x, y)


def test_copies_and_more_programs_of_joined_partitions() -> None:
    x, y = data()
    model = copy.deepcopy(four(schedule=program("1F1B", 4, [0, 0, 0, 1])))
    reference = four()
    for _ in range(2):
        assert torch.equal(model.step(x, y), reference.step(x, y))
    assert_equal(grads_of(model), grads_of(reference))
