"""Frozen weights of bitsandbytes, in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchgpipe
from tests.offload.transfers import counted, transfers_of
from torchgpipe.front.pipelined import pipelined_apart, runs_of
from torchgpipe_balancing.planning.measure import make_costs
from torchgpipe_balancing.planning.model_under_test import ModelUnderTest
from torchgpipe_balancing.planning.problem import Layer

bitsandbytes: Any = pytest.importorskip("bitsandbytes")


class Block(nn.Module):
    """A packed layer, and an adapter beside it."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        if bits == 4:
            packed = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
        else:
            packed = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
        self.packed = packed.to("cpu")  # which packs it
        self.adapter = nn.Sequential(nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.packed(x)) + self.adapter(x)


class Model(nn.ModuleList):
    """Blocks that run twice: the first ones run again on the device of the last."""

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self, *self]:
            x = block(x)
        return x


def plain(bits: int) -> nn.Module:
    torch.manual_seed(0)
    return Model([Block(bits) for _ in range(4)])


OPTIONS: Any = {"chunks": 2, "partitions": 4, "devices": ["cpu"], "loss_fn": functional.mse_loss}


def offloaded(model: nn.Module) -> Any:
    return torchgpipe.pipelined(model, torch.randn(2, 64), offload=True, **OPTIONS)


def test_weights_of_4_bits_in_host_memory() -> None:
    """Evaluation may give a weight other memory, packed for this CPU; and calls may take turns with their backwards."""
    models = offloaded(plain(4)), pipelined_apart(plain(4), torch.randn(2, 64), checkpoint=True, **OPTIONS)
    for _ in range(2):
        x, y = torch.randn(4, 64), torch.randn(4, 64)
        assert torch.equal(*[model.step(x, target=y) for model in models])
        for model in models:
            first, second = model(x), model(y)
            (first.sum() * 2).backward()
            second.sum().backward()
        for ours, theirs in zip(*[model.parameters() for model in models], strict=True):
            assert ours.grad is theirs.grad or torch.equal(ours.grad, theirs.grad)
    block, moved = models[0][0], transfers_of(runs_of(models[0]).host_memory)  # type: ignore[union-attr]
    state = block.packed.weight.quant_state
    # The packed bytes, their scales of 8 bits with an offset and a code, and the scales of these with another code.
    parts = [block.packed.weight, state.absmax, state.offset, state.code, state.state2.absmax, state.state2.code]
    size = sum([part.nbytes for part in (*parts, *block.adapter.parameters())])
    for _ in range(2):
        bytes = moved.bytes_up
        with torch.no_grad(), counted():
            assert torch.equal(*[model.eval()(x) for model in models])
        assert moved.bytes_up - bytes >= 4 * size and not any(moved.present.values())
    tested = ModelUnderTest(plain(4), torch.randn(2, 64), None, 2, {"loss_fn": functional.mse_loss})
    costs = make_costs(tested, [[Layer()] * len(tested.layers)], [2], [])
    assert sum([layer.parameters for layer in costs.layers]) == 4 * size, "a plan counts what moves"


def test_a_layer_that_takes_the_scales_from_its_weight_is_refused() -> None:
    """Two mini-batches would share the module's, and read what has left the device. It is as it was afterwards."""
    model, x = plain(8), torch.randn(2, 64)
    with pytest.raises(RuntimeError, match=r"takes CB, SCB from the weight 'weight' of a Linear8bitLt.*load_in_4bit"):
        offloaded(model)
    assert torch.equal(model(x), plain(8)(x))
