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
        ours = torchgpipe.pipelined(model, x[:2], verify=False, balance="parameters", **options)
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


def test_adapters_that_were_applied_before_the_proof_are_told_to_follow() -> None:
    """They stay on their device while the sample runs, and what was said of it was about rows."""
    model, _ = make()
    sample = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="same device") as caught:
        torchgpipe.pipelined(model, sample, chunks=2, devices=["late:0", "late:1"])
    assert "call pipelined before it is applied, torchgpipe.follow after" in "".join(caught.value.__notes__)


def test_adapters_that_are_applied_after_the_proof_follow() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    plain, expected = make()
    plain(x).square().mean().backward()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).requires_grad_(False).double()
    torchgpipe.pipelined(model, x[:2], chunks=3, devices=["late:0", "late:1"])
    network = follow(nn.ModuleList(map(LoRA, model)).double(), model)
    network.load_state_dict(expected.state_dict())
    model(x).square().mean().backward()
    for ours, parameter in zip(network.parameters(), expected.parameters()):
        torch.testing.assert_close(ours.grad.cpu(), parameter.grad)
