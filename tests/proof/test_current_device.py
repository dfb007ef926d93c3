"""The current device while a proof runs the plain model: a kernel of Triton's refuses tensors of another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchgpipe
from torchgpipe import GPipe

pytestmark = pytest.mark.late


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.device.type == "late" and torch.accelerator.current_device_index() != x.device.index:
            raise RuntimeError(f"the tensor is on {x.device}, which is not current")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class _Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Kernel.apply(super().forward(x).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("front", ["GPipe", "pipelined"])
def test_a_kernel_finds_the_device_of_its_tensors_current(front: str) -> None:
    layers = nn.Sequential(*[_Block(4, 4) for _ in range(4)])
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    options: Any = {"chunks": 3, "devices": ["late:0", "late:1"], "loss_fn": functional.mse_loss}
    model: Any = GPipe(layers, [2, 2], **options) if front == "GPipe" else None
    model = model or torchgpipe.pipelined(layers, x[:2], **options)
    assert model.verify(x, target=y).is_equal
