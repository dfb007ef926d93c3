"""What processes of a model send to each other, and how often they compute what they do not have."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import torchgpipe
from tests.distributed.launch import launch
from tests.front.test_recomputed import X, noting
from torchgpipe.processes.stand_in import StandIn

pytestmark = pytest.mark.slow

M, N, ROWS, WIDTH = 4, 2, 2, 4


calls_without_values: Counter[nn.Module] = Counter()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *values: Tensor) -> Tensor:
        # Not in an attribute of the module, which would have to count in all processes.
        calls_without_values[self] += isinstance(values[-1], StandIn)
        return self.linear(sum(values))


class Chain(nn.Module):
    """Blocks with residuals and a mask of real values; rows that begin with a large number take skips as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.blocks[0](x)
        mask = (x > 0).to(x.dtype)
        for block in self.blocks[1:]:
            skip = (first[:, :1],) if x[0, 0] > 100 else ()  # Of another shape, and it crosses first.
            h = h + block(*skip, h) * mask
        return h + first if x[0, 0] > 100 else h


def step(mesh: Any, skips: tuple[int, ...], partitions: int, way: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model: Any = Chain().double()
    x = torch.randn(M * ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    for i in skips:
        x[i * ROWS, 0] = 101.0
    sample = torch.full((ROWS, WIDTH), 101.0).double()
    where = {"devices": [f"cpu:{j}" for j in range(partitions)]} if mesh is None else {"mesh": mesh}
    how: dict[str, Any] = {"chunks": M, "partitions": partitions, "balance": "parameters", "verify": False}
    schedule = "1F1B" if partitions == N else "Interleaved1F1B"
    torchgpipe.pipelined(model, (sample,), loss_fn=F.mse_loss, schedule=schedule, **how, **where)
    for _ in range(2):
        model.zero_grad()
        if way == "step":
            model.step(x, target=torch.zeros_like(x))
        else:
            F.mse_loss(output := model(x), torch.zeros_like(x, device=output.device)).backward()
    grads = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if type(p.grad) is Tensor}
    if mesh is None:
        return grads, {}, 0
    counts = dict(model._runs().together.processes.messages.counts)
    return grads, counts, max(calls_without_values[block] for block in model.blocks)


def step_over_processes(*args: Any) -> tuple[Any, ...]:
    return step(dist.init_device_mesh("cpu", (N,)), *args)


def test_what_crosses_is_sent_once_and_blocks_of_other_processes_never_run() -> None:
    """They ran on stand-ins, once for each form, and once for each micro-batch if that was not noticed to be one."""
    first, last = launch(N, step_over_processes, (), N, "step")
    nbytes = ROWS * WIDTH * 8
    # In each of two steps one hidden state of each micro-batch, and neither the mask nor skips, which are not taken.
    assert first[1]["tensors sent"] == 2 * M and first[1]["tensors bytes"] == 2 * M * nbytes
    assert last[1]["gradients sent"] == 2 * M and last[1]["gradients bytes"] == 2 * M * nbytes
    assert "gradients sent" not in first[1] and "tensors sent" not in last[1]
    assert first[2] == last[2] == 0


@pytest.mark.parametrize(("partitions", "way"), [(N, "call"), (2 * N, "step")])
def test_micro_batches_with_other_crossings(partitions: int, way: str) -> None:
    """Each process once expected what crossed in the micro-batch before, and got something else."""
    skips = (1, 2)
    expected, _, _ = step(None, skips, partitions, "step")
    found: dict[str, Any] = {}
    for grads, _, _ in launch(N, step_over_processes, skips, partitions, way):
        found |= grads
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] == grad).all() if way == "step" else abs(found[name] - grad).max() < 1e-12, name


def _recomputed_in_each() -> Any:
    events: list[str] = []
    grads = []
    for mode in ("never", ["layers.0", "layers.1"]):
        torch.manual_seed(0)
        model: Any = noting(events)
        torchgpipe.pipelined(
            model,
            X[:2],
            chunks=3,
            mesh=init_device_mesh("cpu", (2,)),
            devices=["cpu"],
            balance={"layers.3": 1},
            checkpoint=mode,
            loss_fn=lambda y, _: y.pow(2).mean(),
        )
        events.clear()
        model.step(X)
        grads.append([parameter.grad for parameter in [*model.parameters()]])
    assert all(map(torch.equal, *grads))
    return events


def test_all_modules_of_a_cell_run_again_before_the_gradient_comes_from_another_process() -> None:
    """A process waited for the gradient, and recomputed afterwards."""
    assert launch(2, _recomputed_in_each) == [3 * ["second", "first", "gradient"], []]
