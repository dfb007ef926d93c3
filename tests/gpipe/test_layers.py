"""The layers of a `GPipe`: indexing, iteration, and layers that are replaced, added or deleted."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.conftest import Pipe
from tests.gpipe.helpers import make_input, make_model
from tests.layers import Apply


def test_len_indexing_and_iteration_go_over_the_layers(pipe: Pipe) -> None:
    module = make_model(3)
    model = pipe(module, [1, 2])
    assert len(model) == 3
    assert list(model) == list(module)
    assert [model[0], model[1], model[2]] == list(module)
    assert [model[-1], model[-2], model[-3]] == list(reversed(module))
    for index in [3, -4]:
        with pytest.raises(IndexError):
            model[index]


def test_a_layer_replaced_by_setattr_is_the_one_that_runs(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(OrderedDict(a=nn.Identity(), b=nn.Identity(), c=nn.Identity())), [1, 2], chunks=2)
    x = make_input()
    assert torch.equal(model(x), x)
    model.b = Apply(lambda x: x * 3)
    assert torch.equal(model(x), x * 3)
    assert model.partitions[1][0] is model.b is model[1]
    model.a = Apply(lambda x: x + 1)
    assert torch.equal(model(x), (x + 1) * 3)


def test_a_layer_replaced_by_its_index_runs_on_its_device(pipe: Pipe) -> None:
    """It once was an error of Python that names no way."""
    model = pipe(nn.Sequential(OrderedDict(a=nn.Identity(), b=nn.Identity(), c=nn.Identity())), [1, 2], chunks=2)
    model[-2] = nn.Linear(2, 3, device="meta", dtype=torch.float64)
    assert model(make_input()).shape == (6, 3)
    assert model.partitions[1][0] is model.b is model[1]
    assert model.balance == [1, 2]
    assert [*model.state_dict()] == ["b.weight", "b.bias"]


def test_a_parameter_of_a_replaced_layer_gets_its_gradient(pipe: Pipe, checkpoint: str) -> None:
    model = pipe(make_model(3), [1, 2], chunks=2, checkpoint=checkpoint)
    model(make_input()).sum().backward()
    setattr(model, "1", nn.Linear(2, 2, bias=False, dtype=torch.float64))
    model[0].weight = nn.Parameter(torch.eye(2, dtype=torch.float64))
    model(make_input()).sum().backward()
    assert dict(model.named_parameters()).keys() == {"0.weight", "0.bias", "1.weight", "2.weight", "2.bias"}
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_replaced_in_a_nested_one_runs(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Sequential(nn.Identity()), nn.Identity()), [1, 1], chunks=2)
    model[0][0] = Apply(lambda x: x * 3)
    x = make_input()
    assert torch.equal(model(x), x * 3)


def test_convert_sync_batchnorm(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2))), [1, 2], chunks=2)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model.partitions[0][0], nn.SyncBatchNorm)
    assert isinstance(model[2][0], nn.SyncBatchNorm)
    model(torch.randn(6, 2)).sum().backward()
    assert model[0].num_batches_tracked == 2


def test_layers_that_come_or_go_are_an_error_at_the_call(pipe: Pipe) -> None:
    """An added layer was once listed and saved but never ran; a deleted one raised a KeyError of its name alone."""
    model = pipe(make_model(3), [1, 2])
    model.add_module("head", nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"\['head'\] was added; .*unwrap\(\)"):
        model(make_input())
    del model.head, model._modules["1"]
    with pytest.raises(RuntimeError, match=r"\['1'\] was deleted; put nn.Identity\(\)"):
        model(make_input())
