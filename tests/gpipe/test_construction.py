"""The constructor of `GPipe`: modules and balances that it accepts, and what wrapping does not change."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.conftest import Pipe
from tests.gpipe.helpers import make_input, make_model
from torchgpipe import GPipe


def test_a_subclass_of_sequential_is_one() -> None:
    class Model(nn.Sequential):
        pass

    x = make_input()
    module = Model(*make_model(2))
    assert torch.equal(GPipe(module, [1, 1], devices=["cpu", "cpu"])(x), module(x))


def test_an_empty_sequential_returns_its_input() -> None:
    model = GPipe(nn.Sequential(), [])
    x, y = make_input(), make_input(3)
    assert model(x) is x
    assert model((x, [y, None])) == (x, [y, None])
    assert len(model) == 0
    assert list(model) == []
    assert model.balance == model.devices == list(model.partitions) == []


def test_the_wrapped_sequential_is_not_changed(pipe: Pipe) -> None:
    module = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2), c=nn.Dropout()))
    layers, state = list(module.named_children()), set(vars(module))
    parameters = dict(module.named_parameters())
    pipe(module, [1, 2], chunks=2)
    assert list(module.named_children()) == layers
    assert set(vars(module)) == state
    assert all(parameters[name] is parameter for name, parameter in module.named_parameters())
    module(torch.randn(4, 2)).sum().backward()


def test_wrapping_leaves_every_layer_in_the_mode_that_it_is_in(pipe: Pipe) -> None:
    """A frozen batch norm, in eval mode inside a training model, was once put into training mode by wrapping."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    module[1].eval()
    model = pipe(module, [1, 2])
    assert model.training
    assert [layer.training for layer in module] == [True, False, True]

    module.eval()
    module[2].train()
    model = pipe(module, [1, 2])
    assert not model.training
    assert [layer.training for layer in module] == [False, False, True]


@pytest.mark.parametrize("balance", [(1, 2), iter([1, 2]), torch.tensor([1, 2]), numpy.array([1, 2]), range(1, 3)])
def test_balance_may_be_any_iterable_of_integers(balance: Any) -> None:
    model = GPipe(make_model(3), balance, devices=["cpu", "cpu"])
    assert model.balance == [1, 2]
    assert [type(number) for number in model.balance] == [int, int]


def test_balance_may_be_a_keyword() -> None:
    assert GPipe(make_model(3), balance=[3], devices=["cpu"]).balance == [3]
