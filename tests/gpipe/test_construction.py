"""The constructor of `GPipe`: modules it accepts and refuses, and what wrapping does not change."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Pipe
from tests.gpipe.helpers import make_input, make_model
from tests.plain import assert_same, outcome, plain_outcome
from torchgpipe import GPipe


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]), nn.Identity, None, print])
def test_module_must_be_sequential(module: Any) -> None:
    with pytest.raises(TypeError, match=r"^module must be nn\.Sequential to be partitioned, .*torchgpipe\.pipelined"):
        GPipe(module, [1])


def test_a_subclass_of_sequential_is_one() -> None:
    class Model(nn.Sequential):
        pass

    x = make_input()
    module = Model(*make_model(2))
    assert torch.equal(GPipe(module, [1, 1], devices=["cpu", "cpu"])(x), module(x))


def test_duplicate_children_are_refused_and_named() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="duplicate children") as caught:
        GPipe(nn.Sequential(OrderedDict(encoder=layer, middle=nn.ReLU(), decoder=layer)), [2, 1])
    assert "'encoder'" in str(caught.value)
    assert "'decoder'" in str(caught.value)


def test_a_parameter_in_partitions_on_different_devices_is_refused_and_both_owners_named() -> None:
    module = nn.Sequential(
        OrderedDict(encoder=nn.Linear(1, 1), middle=nn.ReLU(), decoder=nn.Sequential(nn.Linear(1, 1)))
    )
    module.decoder[0].weight = module.encoder.weight
    with pytest.raises(
        ValueError, match=r"^module with duplicate parameters in distinct children is not supported"
    ) as caught:
        GPipe(module, [1, 2], devices=["cpu:0", "cpu:1"])
    assert "encoder.weight" in str(caught.value)
    assert "decoder.0.weight" in str(caught.value)


def test_a_layer_used_inside_two_others_on_different_devices_is_refused() -> None:
    shared = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="duplicate parameters"):
        GPipe(nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)), [1, 1], devices=["cpu:0", "cpu:1"])


def test_all_duplicate_parameters_are_reported_at_once() -> None:
    module = make_model(3)
    module[2].weight, module[2].bias = module[0].weight, module[0].bias
    with pytest.raises(ValueError, match="duplicate parameters") as caught:
        GPipe(module, [1, 2], devices=["cpu:0", "cpu:1"])
    assert all(name in str(caught.value) for name in ["0.weight", "2.weight", "0.bias", "2.bias"])


def test_a_parameter_in_partitions_on_one_device_works(checkpoint: str) -> None:
    def tied() -> nn.Sequential:
        # powers of two: sums are exact in any order
        module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        with torch.no_grad():
            module[0].weight.copy_(torch.tensor([[1.0, 2.0], [-4.0, 1.0]]))
            module[0].bias.copy_(torch.tensor([1.0, -1.0]))
            module[2].bias.copy_(torch.tensor([2.0, 0.5]))
        module[2].weight = module[0].weight
        return module

    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    plain = tied()
    model = GPipe(tied(), [1, 1, 1], devices=["cpu", "cpu", "cpu"], chunks=2, checkpoint=checkpoint)
    assert_same(outcome(model, x), plain_outcome(plain, x, chunks=2))


def test_a_parameter_twice_in_one_partition_works(pipe: Pipe) -> None:
    module = make_model(3)
    module[1].weight = module[0].weight
    model = pipe(module, [2, 1], chunks=2)
    model(make_input()).sum().backward()
    assert model[0].weight is model[1].weight
    assert model[0].weight.grad is not None


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
