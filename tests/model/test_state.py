"""A tensor that a layer keeps, changes in place for each micro-batch, and returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.front.models import chain
from tests.layers import Apply
from torchgpipe import GPipe, pipelined
from torchgpipe.model import state

DEVICES = ["cpu:0", "cpu:1"]


class Counts(nn.Linear):
    """Keeps a sum over the rows that it has seen, and returns it, or a view of it, beside its output."""

    def __init__(self, view: bool) -> None:
        super().__init__(4, 4)
        self.seen = torch.zeros(4)
        self.view = view

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.seen += x.detach().sum(0)
        return super().forward(x), self.seen[None] if self.view else self.seen


def product(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] * pair[1]


def glued(self: Any, x: Tensor) -> Tensor:
    """Use the sum between two modules."""
    x, seen = self.layers[0](x)
    for layer in self.layers[1:]:
        x = layer(x) * seen
    return x


@pytest.mark.parametrize("view", [False, True], ids=["itself", "a view"])
def test_a_later_partition_has_that_of_its_own_micro_batch(view: bool) -> None:
    """Another micro-batch came to the layer before."""
    x = torch.rand(6, 4)
    layers = nn.Sequential(Counts(view), Apply(product))
    plain = copy.deepcopy(layers)
    expected = torch.cat([plain(part) for part in x.chunk(3)])
    options = {"devices": DEVICES, "chunks": 3, "schedule": "GPipe", "loss_fn": lambda output, _: output.mean()}
    model = GPipe(layers, [1, 1], checkpoint="never", **options)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    layers[0].seen.zero_()
    torch.testing.assert_close(model.step(x).to(x.dtype), expected.detach().mean())


def test_attributes_are_walked_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each cell, if its last layer works in place and another one has a buffer."""
    walked = []
    monkeypatch.setattr(state, "attributes", lambda module: walked.append(module) or ())
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)]
    model = GPipe(nn.Sequential(*layers), [3], devices=["cpu"], chunks=4).eval()
    with torch.no_grad():
        model(torch.rand(8, 4))
    assert len(walked) == 1


class Scratch(nn.Linear):
    """Returns its input in memory that it uses again for the next one."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("memory", torch.zeros(8, 4), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.memory[: len(x)] = x.detach()
        return super().forward(x), self.memory[: len(x)]


def test_a_pipelined_model_whose_later_partition_uses_it_is_refused() -> None:
    module = chain(glued, Scratch(), *[nn.Linear(4, 4) for _ in range(3)])
    with pytest.raises(ValueError, match="state that another micro-batch changes"):
        pipelined(module, torch.rand(2, 4), chunks=3, devices=DEVICES, balance="parameters")


@pytest.mark.parametrize("front", ["GPipe", "pipelined"])
def test_what_to_do_where_a_layer_changes_what_it_has_computed_with(front: str) -> None:
    """PyTorch tells the shape and the version of a tensor, but not whose it is."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x) * self.scale.add_(1)
            return y

    def trained(checkpoint: Any) -> None:
        model: Any = nn.Sequential(Scales(), nn.Linear(4, 4))
        options: Any = {"devices": DEVICES, "chunks": 3, "schedule": "GPipe", "loss_fn": lambda y, _: y.mean()}
        if front == "GPipe":
            model = GPipe(model, [1, 1], checkpoint=checkpoint, **options)
        else:
            model = pipelined(model, torch.rand(2, 4), verify=False, checkpoint=checkpoint != "never", **options)
        model.step(torch.rand(6, 4))

    with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace .* with a copy \(self.scale.clone\(\)\)"):
        trained("never")
    trained("always")
