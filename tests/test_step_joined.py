"""Neighbouring partitions on one device are one cell of a step, where that changes nothing but the host's time.

`test_transparency` and `test_faults` draw models whose partitions are joined.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe
from tests.layers import Apply
from tests.plain import assert_equal, gradients
from tests.test_step import data, mlp, stepping
from torchgpipe import GPipe
from torchgpipe.engine import step as engine
from torchgpipe.model.views import Joined
from torchgpipe.schedule import Action, program

FOUR = ["cpu:0", "cpu:0", "cpu:0", "cpu:1"]
APART = [[0], [1], [2], [3]]


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
    return stepping(module or mlp(), FOUR, **{"checkpoint": "never", **options})


def hooked() -> GPipe:
    model = four()
    model.partitions[1].register_forward_hook(lambda *_: None)
    return model


def tied() -> GPipe:
    module = mlp()
    module[2][0].weight = module[0][0].weight
    return four(module)


def in_place() -> GPipe:
    return four(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(6, 6)).double())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: four(schedule="GPipe"), [[0, 1, 2], [3]]),
        (lambda: four(schedule="1F1B"), [[0, 1, 2], [3]]),
        (lambda: four(checkpoint="always"), APART),
        (lambda: four(checkpoint=["1"]), APART),  # what is recomputed keeps its own input only
        (lambda: four(schedule="ZeroBubble"), APART),  # a part could not be split because of another one
        (hooked, APART),
        (tied, APART),
        # It runs on a copy of the output of a sigmoid, which the backward of the sigmoid needs.
        (in_place, [[0, 1], [2], [3]]),
    ],
)
def test_neighbours_are_joined_where_nothing_changes(
    columns: list[list[int]], make: Callable[[], GPipe], expected: list[list[int]]
) -> None:
    model = make()
    model.step(*data())
    assert columns == expected
    with torchgpipe.record(model):
        model.step(*data())
    assert columns == APART


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
    assert_equal(gradients(model), gradients(reference))


def test_a_value_between_joined_partitions_is_checked(columns: list[list[int]]) -> None:
    layers = list(mlp())
    layers[1] = nn.Sequential(layers[1], Apply(lambda x: {"x": x, "name": "x"}))
    with pytest.raises(TypeError, match=r"'name'.* is str"):
        four(nn.Sequential(*layers)).step(*data())
    assert columns == [[0, 1, 2], [3]]


def test_layers_may_have_the_names_of_attributes_of_joined_partitions() -> None:
    """These attributes were set behind the layers, and a step raised an error of torch about child modules."""
    names = [name for name in vars(Joined([GPipe(mlp(), [4]).partitions[0]])) if name not in vars(nn.Module())]
    assert {"_runs", "_parts"} <= {*names}
    module = nn.Sequential(OrderedDict((name, nn.Linear(6, 6).double()) for name in names))
    stepping(module, ["cpu"] * len(names), checkpoint="never").step(*data())


def test_copies_and_more_programs_of_joined_partitions() -> None:
    model = copy.deepcopy(four(schedule=program("1F1B", 4, [0, 0, 0, 1])))
    reference = four()
    for _ in range(2):
        assert torch.equal(model.step(*data()), reference.step(*data()))
    assert_equal(gradients(model), gradients(reference))
