"""A caller's own streams, which the threads of the autograd engine do not always know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from torchgpipe import GPipe, pipelined

pytestmark = pytest.mark.late

DEVICES = ["late:0", "late:1"]


class ToHost(nn.Module):
    """Computes on the current accelerator, and returns its output on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + torch.ones(4, device="late")).cpu()


def test_a_recomputation_of_what_goes_to_the_host_is_on_its_device() -> None:
    """Its node of the autograd graph belongs to no accelerator, so the engine does not enter one."""
    model = GPipe(nn.Sequential(ToHost()), [1], devices=DEVICES[1:], chunks=2, checkpoint="always")
    model(torch.ones(4, 4)).sum().backward()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_gradients_of_a_pipelined_model_are_ready_for_nodes_of_other_streams() -> None:
    """The engine lets these wait for the stream of the one node of the mini-batch, which is of one device."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    pipelined(model, torch.ones(2, 4), chunks=2, devices=DEVICES, balance="parameters")
    nodes = [get_gradient_edge(parameter) for parameter in model.parameters()]  # as DistributedDataParallel keeps
    streams = [torch.Stream(device) for device in DEVICES]
    for _ in range(2):
        with streams[1], streams[0]:
            loss = model(torch.ones(4, 4)).sum()
        for stream in streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        loss.backward()
    gradients = [node.node.variable.grad for node in nodes]
    assert all([bool(gradient.isfinite().all()) for gradient in gradients])
