"""Weights whose scales are attributes of theirs, as those of quantised layers are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from torchgpipe import GPipe
from torchgpipe.model.attached import attributes_with, move_attached

pytestmark = pytest.mark.late


class State:
    """What a packed weight is unpacked with, in an object that the layer knows, too."""

    __slots__ = ("code", "inner", "scales")

    def __init__(self, scales: Tensor, inner: State | None = None) -> None:
        self.scales, self.inner = scales, inner
        self.code = (torch.tensor([0.0, 0.5]).to(scales), "nf1")


class Packed(nn.Module):
    """A frozen layer of one bit a weight."""

    def __init__(self) -> None:
        super().__init__()
        bits = torch.randint(2, (4, 4), dtype=torch.uint8)
        self.weight = nn.Parameter(bits, requires_grad=False)
        self.state = State(torch.rand(4).double(), State(torch.rand(4).double()))
        self.weight.state = self.state  # type: ignore[attr-defined]
        self.bias = nn.Parameter(torch.randn(4).double())

    def forward(self, x: Tensor) -> Tensor:
        state: Any = self.weight.state  # type: ignore[attr-defined]
        assert state is self.state
        return x @ (state.code[0][self.weight.long()] * state.scales * state.inner.scales) + self.bias


@pytest.mark.parametrize("front", ["GPipe", "pipelined"])
def test_the_scales_of_a_weight_come_to_its_device(front: str) -> None:
    """They stayed where they were: 'Expected all tensors to be on the same device'."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[Packed() for _ in range(4)])
    x = torch.randn(6, 4).double()
    expected = model(x)
    options: Any = {"chunks": 3, "devices": ["late:0", "late:1"]}
    model = GPipe(model, [2, 2], **options) if front == "GPipe" else torchgpipe.pipelined(model, x[:2], **options)
    torch.testing.assert_close(model(x).cpu(), expected.detach())


def test_what_leads_to_another_parameter_is_no_part_of_this_one() -> None:
    """Such as an optimizer that steps in a hook; containers stay the objects that they are, also in a circle."""
    weight, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    items: list[Any] = [torch.zeros(1), {"scale": (3, torch.zeros(1))}]
    items.append(items)
    weight.items, weight.state = items, {other: torch.zeros(1), "trained": other}  # type: ignore[attr-defined]
    move_attached(weight, torch.device("late:1"))
    assert weight.items is items  # type: ignore[attr-defined]
    assert items[0].device == items[1]["scale"][1].device == torch.device("late:1")
    assert weight.state[other].device == other.device == torch.device("cpu")  # type: ignore[attr-defined]


def test_other_tensors_are_in_copies_of_what_holds_them() -> None:
    """What two attributes share stays shared, also in a circle; a tuple that two shared was moved in one of them."""
    weight, pair = nn.Parameter(torch.zeros(1)), (torch.zeros(1), "scale")
    state = State(torch.zeros(1), State(torch.zeros(1)))
    state.code = [pair, state]  # type: ignore[assignment]
    weight.state, weight.again, weight.pair = state, {"state": state}, pair  # type: ignore[attr-defined]
    changed = attributes_with(weight, lambda tensor: tensor + 1)
    copied = changed["state"]
    assert copied is not state and copied.code[1] is copied is changed["again"]["state"]
    for found, value in ((copied, 1), (state, 0)):
        assert [found.scales, found.inner.scales, found.code[0][0]] == [value] * 3  # type: ignore[union-attr]
    assert changed["pair"] == (1, "scale") and weight.pair is pair  # type: ignore[attr-defined]
    move_attached(weight, torch.device("late:1"))
    assert weight.pair[0].device == state.code[0][0].device == torch.device("late:1")  # type: ignore[attr-defined]
