"""A `GPipe` behaves like any other module: modes, hooks, freezing, copies."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.conftest import Pipe
from tests.gpipe.helpers import make_input, make_model
from tests.plain import assert_same, outcome
from torchgpipe import GPipe


def test_train_and_eval_reach_the_layers(pipe: Pipe) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5)))
    model = pipe(module, [1, 1])
    assert model.eval() is model
    assert not any(layer.training for layer in module.modules() if layer is not module)
    x = torch.randn(4, 2)
    assert torch.equal(model(x), model(x))
    model.train()
    assert all(layer.training for layer in module.modules())


def test_apply_visits_every_module_once(pipe: Pipe) -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    model = pipe(module, [1, 1])
    visited: list[nn.Module] = []
    model.apply(visited.append)
    assert visited == [module[0], module[1][0], module[1][1], module[1], model]


def test_hooks_on_the_model_act_once_per_call(pipe: Pipe) -> None:
    model = pipe(make_model(2), [1, 1], chunks=3)
    calls = []
    model.register_forward_pre_hook(lambda _module, args: calls.append(("forward pre", args[0].shape)))
    model.register_forward_hook(lambda _module, _args, output: calls.append(("forward", output.shape)))
    model.register_full_backward_hook(lambda _module, _inputs, grads: calls.append(("backward", grads[0].shape)))
    model(make_input()).sum().backward()
    assert calls == [("forward pre", (6, 2)), ("forward", (6, 2)), ("backward", (6, 2))]


def test_requires_grad_freezes_all(pipe: Pipe) -> None:
    model = pipe(make_model(2), [1, 1], chunks=2)
    model.requires_grad_(False)
    assert not model(make_input().detach()).requires_grad
    x = make_input()
    model(x).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


# Copies


def copied(model: GPipe, how: str) -> GPipe:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("after", ["nothing", "forward", "backward"])
def test_a_copy_is_a_model_of_its_own(pipe: Pipe, how: str, after: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Tanh(), nn.BatchNorm1d(2, dtype=torch.float64))
    model = pipe(module, [1, 2], chunks=2, checkpoint="always")
    x = make_input()
    if after != "nothing":
        output = model(x)
    if after == "backward":
        output.sum().backward()
    twin = copied(model, how)
    assert twin.devices == model.devices
    assert twin.balance == model.balance
    assert twin.chunks == 2
    assert twin.checkpoint == "always"
    assert [list(partition) for partition in twin.partitions] == [[twin[0]], [twin[1], twin[2]]]
    model.zero_grad()
    assert_same(outcome(twin, x), outcome(model, x))
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.any()
    setattr(twin, "1", nn.Identity())
    assert isinstance(model.partitions[1][0], nn.Tanh)
    assert isinstance(twin.partitions[1][0], nn.Identity)
