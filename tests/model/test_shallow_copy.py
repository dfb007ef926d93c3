"""A shallow copy under another class shares all state with the original."""

from __future__ import annotations

import torch
from torch import nn

from torchgpipe.model.shallow_copy import shallow_copy


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_copy_is_of_the_other_class_and_runs_as_that_does() -> None:
    layer, x = nn.Linear(2, 2), torch.rand(3, 2)
    copy = shallow_copy(layer, Doubled)
    assert type(copy) is Doubled
    assert type(layer) is nn.Linear
    assert torch.equal(copy(x), 2 * layer(x))


def test_copy_and_original_share_later_changes() -> None:
    layer = nn.Linear(2, 2)
    copy = shallow_copy(layer, Doubled)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    layer.add_module("child", nn.Tanh())
    assert copy.weight is layer.weight
    assert copy.child is layer.child
    copy(torch.rand(3, 2))
    assert calls == ["hook"]


def test_a_copy_of_a_compiled_module_is_not_compiled() -> None:
    layer, x = nn.Linear(2, 2), torch.rand(3, 2)
    layer.compile(backend="eager")
    assert torch.equal(shallow_copy(layer, Doubled)(x), 2 * nn.functional.linear(x, layer.weight, layer.bias))
