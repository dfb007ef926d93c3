"""Replicas of a pipeline over a mesh of two dimensions step as one process does on all of their data."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import torchgpipe
from tests.distributed.launch import launch
from tests.distributed.models import Task, assert_step, weigh
from tests.layers import With
from torchgpipe.gradients.replicas import add_over_replicas
from torchgpipe.processes.processes import Processes

pytestmark = pytest.mark.slow


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), frozen, nn.Linear(4, 5)).double()


def labelled(size: int) -> tuple[Tensor, Tensor]:
    """Return rows, and labels of which some do not count."""
    draw = torch.Generator().manual_seed(size)
    labels = torch.randint(5, (size,), generator=draw)
    labels[1::3] = -100
    return torch.rand(size, 4, dtype=torch.float64, generator=draw), labels


ROWS = Task(layers, labelled, F.cross_entropy, weigh)


def pipeline(model: nn.Sequential, mesh: DeviceMesh, loss_fn: Any) -> Any:
    half = len(model) // 2
    sample = torch.rand(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torchgpipe.pipelined(
        model, sample, chunks=4, mesh=mesh, balance=[half, len(model) - half], loss_fn=loss_fn, verify=False
    )


def of_all(mesh: DeviceMesh) -> None:
    """Mini-batches of different sizes, labels that do not count, and a hook, which hears the sum of the replicas once.

    All begin with the parameters of the first. Running statistics are those of the replica.
    """
    replica = mesh.get_local_rank(0)
    plain = layers()
    mine = copy.deepcopy(plain)
    if replica == 1:
        for parameter in mine.parameters():
            torch.nn.init.constant_(parameter, 3.0)
    model = pipeline(mine, mesh, F.cross_entropy)
    heard: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad, parameter=parameter: heard.append((parameter, grad.clone())))
    for sizes in [(8, 8), (12, 7), (8, 19)]:
        assert_step(ROWS, model, plain, sizes, replica)
        assert heard
        assert len(heard) == len({parameter for parameter, _ in heard})
        for parameter, grad in heard:
            torch.testing.assert_close(grad, parameter.grad)
        heard.clear()
        model.zero_grad()
        plain.zero_grad()


def of_used_in_one(mesh: DeviceMesh) -> None:
    """A parameter that one replica uses has its gradient in both; a sparse one let the other replica wait."""
    replica = mesh.get_local_rank(0)
    for sparse in (False, True):
        embedding = nn.Embedding(4, 4, sparse=sparse).double()
        layer = With(embedding, lambda it, x: x + it(torch.zeros(len(x), dtype=torch.long)) if replica else x)
        model = pipeline(nn.Sequential(layer, nn.Linear(4, 4).double()), mesh, F.mse_loss)
        x, y = torch.rand(2, 4, 4, dtype=torch.float64)
        is_here = mesh.get_local_rank(1) == 0
        if sparse and is_here:
            with pytest.raises(ValueError, match="sparse gradients cannot be added up over replicas"):
                model.step(x, target=y)
        else:
            model.step(x, target=y)
            assert sparse or not is_here or embedding.weight.grad[0].any()


def of_memory(mesh: DeviceMesh) -> None:
    """Gradients and their sums were there at the same time, all of them."""
    model = pipeline(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)]).double(), mesh, F.mse_loss)
    own: list[Any] = []
    there: list[int] = []
    add_replicas = Processes.add_replicas

    def begin(parameters: Sequence[Tensor], grads: list[Any], processes: Processes) -> Any:
        own.extend([weakref.ref(grad) for grad in grads if grad is not None])
        return add_over_replicas(parameters, grads, processes)

    def count(self: Processes, tensor: Tensor, what: str) -> None:
        there.append(sum(one() is not None for one in own))
        add_replicas(self, tensor, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchgpipe.gradients.replicas._BUCKET", 1)
        patch.setattr("torchgpipe.gradients.of_steps.add_over_replicas", begin)
        patch.setattr(Processes, "add_replicas", count)
        model.step(torch.rand(4, 4).double(), target=torch.rand(4, 4).double())
    assert [count for count in there if count] == [3, 2, 1]


def of_four() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    of_all(mesh)
    of_memory(mesh)
    of_used_in_one(mesh)


def test_replicas_step_as_one_process_on_all_of_their_data() -> None:
    launch(4, of_four)
