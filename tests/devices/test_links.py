"""Copies between accelerators whose link is broken, which nothing but their bytes tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchgpipe
from torchgpipe import GPipe
from torchgpipe.devices import links

pytestmark = pytest.mark.late


class _Zeros(torch.autograd.Function):
    """Zeros arrive forward; the way back, over the link in the other direction, is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@pytest.fixture
def zeros_from_0_to_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that is copied from device 0 to device 1 arrive as zeros, and no link be known."""
    plain, bad = torch.Tensor.to, (torch.device("late:0"), torch.device("late:1"))

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved = plain(self, *args, **kwargs)
        return _Zeros.apply(moved) if (self.device, moved.device) == bad else moved  # type: ignore[no-any-return]

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(links, "_works", {})
    monkeypatch.setattr(links, "_broken", set())


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]).double()


@pytest.mark.parametrize("front", ["GPipe", "pipelined"])
def test_tensors_go_through_host_memory_where_a_link_is_broken(front: str, zeros_from_0_to_1: None) -> None:
    """The loss was wrong, and ``verify`` agreed: the plain run of a proof crosses the same link."""
    x, y, devices = torch.randn(6, 4).double(), torch.randn(6, 4).double(), ["late:0", "late:1"]
    plain = _model()
    loss = functional.mse_loss(plain(x), y)
    loss.backward()
    options: Any = {"chunks": 3, "devices": devices, "loss_fn": functional.mse_loss}
    with pytest.warns(UserWarning, match="from late:0 to late:1 are broken"):
        model: Any = (
            GPipe(_model(), [2, 2], **options)
            if front == "GPipe"
            else torchgpipe.pipelined(_model(), x[:2], verify=False, **options)
        )
    torch.testing.assert_close(model.step(x, target=y).cpu(), loss.detach())
    for ours, parameter in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad.cpu(), parameter.grad)
    assert model.verify(x, target=y).is_equal
