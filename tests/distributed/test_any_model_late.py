"""A model over processes on asynchronous accelerators, whose memory no group of processes can send from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchgpipe
from tests import late
from tests.distributed.launch import launch
from torchgpipe.processes.stand_in import StandIn

pytestmark = [pytest.mark.late, pytest.mark.skipif(not late.available(), reason="needs a compiler")]


class Residual(nn.Module):
    """Blocks with a skip over all of them, a parameter that the glue uses, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.first(x) * self.scale
        for block in self.blocks:
            h = h + block(h).tanh() * (h > 0)
        return (h + first).square().mean()


def made() -> tuple[Residual, Tensor]:
    torch.manual_seed(0)
    return Residual(), torch.randn(8, 8)


def train(places: int, partitions: int, schedule: str) -> Any:
    """Return the loss, the gradients of this process, and the uses of memory that nothing orders."""
    late.load()
    model, x = made()
    rank = dist.get_rank()
    torchgpipe.pipelined(
        model,
        x[:2],
        chunks=4,
        mesh=dist.init_device_mesh("cpu", (2,)),
        devices=[f"late:{places * rank + k}" for k in range(places)],
        partitions=partitions,
        balance="parameters",
        schedule=schedule,
    )
    loss: Any = model(x)
    loss.backward()
    loss = model.step(x)  # type: ignore[operator]
    own = [(name, one) for name, one in nn.Module.named_parameters(model) if not isinstance(one, StandIn)]
    return loss.item(), {name: one.grad.cpu().numpy() for name, one in own}, late.hazards()


@pytest.mark.parametrize(
    ("places", "partitions", "schedule"), [(1, 2, "1F1B"), (1, 4, "Interleaved1F1B"), (2, 4, "ZeroBubble")]
)
def test_devices_of_two_processes(places: int, partitions: int, schedule: str) -> None:
    plain, x = made()
    loss = torch.stack([plain(rows) for rows in x.split(2)]).mean()
    (2 * loss).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    seen = set()
    for value, grads, hazards in launch(2, train, places, partitions, schedule):
        assert not hazards
        assert value == pytest.approx(loss.item(), rel=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(torch.from_numpy(grad), expected[name], rtol=1e-4, atol=1e-6)
            seen.add(name)
    assert seen == expected.keys()
