"""Adapters in a network of their own, on the devices of the layers that call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchgpipe
from torchgpipe import GPipe, follow

pytestmark = pytest.mark.late


class LoRA(nn.Module):
    """An adapter that takes the place of a layer's forward, or that a hook of the layer calls."""

    def __init__(self, layer: nn.Linear, *, by_hook: bool = False) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.original = layer.forward
        if by_hook:
            layer.register_forward_hook(lambda _, args, output: output + self.up(self.down(args[0])))
        else:
            layer.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.original(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def make(by_hook: bool = False) -> tuple[nn.Sequential, nn.ModuleList]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).requires_grad_(False)
    return model.double(), nn.ModuleList([LoRA(layer, by_hook=by_hook) for layer in model]).double()


@pytest.mark.parametrize("front", ["GPipe", "pipelined", "offload"])
@pytest.mark.parametrize("by_hook", [False, True])
def test_adapters_come_to_the_devices_of_their_layers(front: str, by_hook: bool) -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    model, network = make(by_hook)
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in network.parameters()]
    model, network = make(by_hook)
    optimizer = torch.optim.SGD(network.parameters())
    options: Any = {"chunks": 3, "devices": ["late:0", "late:1"], "loss_fn": lambda output, _: output.square().mean()}
    if front == "GPipe":
        ours: Any = GPipe(model, [2, 2], **options)
    else:
        options |= {"offload": True, "partitions": 2} if front == "offload" else {}
        ours = torchgpipe.pipelined(model, x[:2], verify=False, **options)
    assert follow(network, ours) is network
    assert [adapter.up.weight.device.index for adapter in network] == [0, 0, 1, 1]
    ours.step(x)
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], expected):
        torch.testing.assert_close(parameter.grad.cpu(), gradient)


def test_what_cannot_follow_is_named() -> None:
    model, network = make()
    with pytest.raises(TypeError, match="follow takes a GPipe"):
        follow(network, model)
    pipeline = GPipe(model, [2, 2], devices=["late:0", "late:1"])
    with pytest.raises(ValueError, match=r"no layer of the model calls \['more.weight'\]|calls \['more'\]"):
        follow(nn.ModuleDict({"known": network, "more": nn.Linear(2, 2)}), pipeline)
    model[3].forward = model[0].forward
    with pytest.raises(ValueError, match=r"'0' of the network is called by layers on late:0 and on late:1"):
        follow(network, pipeline)
