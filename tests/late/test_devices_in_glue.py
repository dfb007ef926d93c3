"""Devices that a forward names, or remembers: what it makes there is copied when it is computed, and not before.

The copy waited for the mark behind the first column of the micro-batch, and the tensor was made after that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import late
from tests.front.models import Chain, gradients, same
from torchgpipe import pipelined

pytestmark = pytest.mark.late

WIDTH = 64
FLOAT = {"dtype": torch.float64}


class Places(nn.Module):
    """A module without parameters that makes its tensors on the first device, whatever comes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(WIDTH, device="late:0", **FLOAT)


def in_a_block(model: Any, x: Tensor) -> Tensor:
    with torch.device("late:0"):
        return torch.arange(WIDTH, **FLOAT)


#: Each takes the model and the output of a layer.
MADE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "by name": lambda model, x: torch.arange(WIDTH, device="late:0", **FLOAT),
    "by number": lambda model, x: torch.arange(WIDTH, device=0, **FLOAT),
    "in a block": in_a_block,
    "by default": lambda model, x: torch.arange(WIDTH, **FLOAT),
    "zeros": lambda model, x: x.new_zeros(WIDTH, device="late:0") + 1,
    "moved": lambda model, x: (x * 2).detach().to("late:0"),
    "moved with a graph": lambda model, x: (x * 2).to("late:0") * 2,
    "moved to a later layer": lambda model, x: (x * 2).to(model.layers[3].weight.device) * 2,
    "moved by the device's own name": lambda model, x: (x * 2).detach().late(0),  # type: ignore[operator]
}


@pytest.mark.parametrize("name", [*MADE, "by a module"])
def test_what_glue_makes(name: str) -> None:
    def between(model: Any, k: int, x: Tensor, first: Tensor) -> Tensor:
        made: Tensor = model.places[k](x) if name == "by a module" else MADE[name](model, x)
        return x + made

    model: Any = Chain(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).double().to("late:0")
    model.places, model.between = nn.ModuleList([Places() for _ in range(4)]), between
    plain = copy.deepcopy(model)
    x = torch.randn(6, WIDTH, **FLOAT).to("late:0")
    with torch.device("late:0") if name == "by default" else nullcontext():
        pipelined(model, x[:2], chunks=3, devices=["late:0", "late:1"], balance={"layers.2": 1})
        with late.delays(2000):
            output = model(x)
            output.square().sum().backward()
        expected = torch.cat([plain(part) for part in x.chunk(3)])
        torch.testing.assert_close(output.cpu(), expected.cpu(), rtol=1e-12, atol=1e-12)
        expected.square().sum().backward()
    same(gradients(model), gradients(plain))
