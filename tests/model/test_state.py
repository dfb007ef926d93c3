"""A tensor that a layer keeps, changes in place for each micro-batch, and returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.frames.models import chain
from tests.layers import Apply
from torchgpipe import GPipe, pipelined

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
    module = chain(glued, Counts(view), *[nn.Linear(4, 4) for _ in range(3)])
    options = {"devices": DEVICES, "chunks": 3, "schedule": "GPipe", "loss_fn": lambda output, _: output.mean()}
    expected = [torch.cat([plain(part) for part in x.chunk(3)]) for plain in map(copy.deepcopy, (layers, module))]
    model = GPipe(layers, [1, 1], checkpoint="never", **options)
    # The sum depends on what came before the sample, which leaves nothing behind.
    pipe = pipelined(module, x[:2], balance="parameters", verify=False, **options)
    with torch.no_grad():
        assert torch.equal(model(x), expected[0])
    torch.testing.assert_close(pipe(x), expected[1])
    layers[0].seen.zero_()
    module.layers[0].seen.zero_()
    torch.testing.assert_close(model.step(x).to(x.dtype), expected[0].detach().mean())
    torch.testing.assert_close(pipe.step(x), expected[1].detach().mean())


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
