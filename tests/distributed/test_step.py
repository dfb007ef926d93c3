"""A step over several processes equals that of the plain model, micro-batch by micro-batch, also in two replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.launch import launch
from tests.distributed.models import EVERYTHING, MLP, Counter, Task, assert_gradients, assert_step, mlp, plain_step
from torchgpipe import GPipe, MicroBatches
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.distributed import DistributedGPipe

pytestmark = pytest.mark.slow

data = MLP.draw


def steps(
    task: Task, schedule: str, balance: list[int], checkpoint: str = "never", deferred: bool = False, replicas: int = 1
) -> None:
    """Compare steps and evaluation of mini-batches of several sizes in each replica."""
    stages = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, stages)) if replicas > 1 else None
    replica, stage = divmod(dist.get_rank(), stages)
    plain: Any = task.make()
    options = {**task.options, "schedule": schedule, "checkpoint": checkpoint, "deferred_batch_norm": deferred}
    model = DistributedGPipe(copy.deepcopy(plain), balance, mesh=mesh, **options)
    if deferred:
        plain = DeferredBatchNorm.convert_deferred_batch_norm(plain)
    for sizes in [(8, 8), (5, 9), (1, 11)]:
        for module in (plain, model):
            module.train()
            module.zero_grad()
        exact = task is MLP and replicas == 1 and schedule != "GPipe"  # which begins with the last
        assert_step(task, model, plain, sizes[:replicas], replica, exact)
        for module in (plain, model):
            module.eval()
        input, _ = task.draw(sizes[0])
        with torch.no_grad():
            torch.testing.assert_close(model.eval_step(input, gather=True), plain(input))
            assert (model.eval_step(input) is None) == (stage < stages - 1)
    names = dict(model.named_children())
    assert set(model.state_dict()) == {key for key in plain.state_dict() if key.split(".")[0] in names}
    for layer in model.children():
        if isinstance(layer, Counter) and replicas == 1:
            # In the last partition, where backward follows forward under 1F1B, and of a last micro-batch under GPipe.
            assert layer.first_runs == (0 if schedule == "1F1B" or checkpoint == "never" else 5)


def no_grad() -> None:
    model, (input, target) = DistributedGPipe(mlp(), [3] * 2, **MLP.options), data(8)
    with torch.no_grad():
        loss = model.step(input, target)
    assert torch.equal(loss, model.step(input, target))


def an_optimizer_made_before() -> None:
    with torch.device("meta"):
        module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    model = DistributedGPipe(module, [3, 3], **MLP.options)
    before = copy.deepcopy(model.state_dict())
    model.step(*data(8))
    optimizer.step()
    assert all(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def of_two() -> None:
    for schedule in ["GPipe", "Interleaved1F1B", "ZeroBubble"]:
        steps(MLP, schedule, [1, 2, 2, 1])  # several stages in each process
    steps(MLP, "Interleaved1F1B", [2, 1, 1, 2], "always")
    for checkpoint in ["always", "except_last", "never"]:
        steps(EVERYTHING, "1F1B", [3, 9], checkpoint, deferred=True)
        steps(EVERYTHING, "GPipe", [3, 9], checkpoint)
    windows()
    random_numbers()
    no_grad()
    an_optimizer_made_before()


def windows() -> None:
    """Step and evaluate micro-batches that are given, whose outputs could not be gathered."""
    for schedule, balance in [("1F1B", [3, 3]), ("GPipe", [3, 3]), ("Interleaved1F1B", [2, 1, 1, 2])]:
        plain, model = mlp(), DistributedGPipe(mlp(), balance, **{**MLP.options, "schedule": schedule})
        inputs = [torch.randn(rows, time, 4).double() for rows, time in [(1, 3), (2, 2), (1, 5), (3, 2), (2, 4)]]
        loss = model.step(MicroBatches(inputs), MicroBatches([input * 2 for input in inputs]))
        expected = torch.zeros((), dtype=torch.float64)
        for input in inputs:
            share = MLP.loss_fn(plain(input), input * 2) * (len(input) / 9)
            share.backward()
            expected += share.detach()
        torch.testing.assert_close(loss, expected)
        assert_gradients(model, plain)
        outputs = model.eval_step(MicroBatches(inputs), gather=True)
        with torch.no_grad():
            torch.testing.assert_close(outputs, [plain(input) for input in inputs])


def random_numbers() -> None:
    """Dropout is that of one process, also where partitions come in turn, and layers begin to draw in one process."""

    def layers() -> nn.Sequential:
        model = mlp()
        for place in (1, 3, 5, 7):
            model.insert(place, nn.Dropout(0.5 if place > 3 else 0.0))
        return model

    for schedule, balance in [("1F1B", [5, 5]), ("Interleaved1F1B", [3, 2, 2, 3])]:
        options = {**MLP.options, "schedule": schedule, "checkpoint": "always"}
        models: list[Any] = [
            DistributedGPipe(layers(), balance, **options),
            GPipe(layers(), balance, devices=["cpu:0", "cpu:1"] * (len(balance) // 2), **options),
        ]
        for step in range(5):
            losses = []
            for model in models:
                for name, layer in model.named_children():
                    if name == "1" and step == 2:
                        layer.p = 0.5
                torch.manual_seed(step)
                losses.append(model.step(*data(8)))
            assert torch.equal(*losses)
            assert_gradients(models[0], models[1], exact=True)


def clipped() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for norm_type in (2.0, 1.0, float("inf")):
        plain = mlp()
        model = DistributedGPipe(copy.deepcopy(plain), [3, 3], mesh=mesh, **MLP.options)
        plain_step(MLP, plain, data(8))
        model.step(*data(8))
        norm = model.clip_grad_norm_(0.01, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
        torch.testing.assert_close(norm, expected)
        assert_gradients(model, plain)
    with pytest.raises(RuntimeError, match=r"each process has a part of the model: use model.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # Once, each process scaled by the norm of its own.


def refused() -> None:
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    model = DistributedGPipe(mlp(), [3, 3], mesh=mesh, **MLP.options)
    input, target = data(8)
    nothing_sent = "could not prepare the step, and says why; nothing was sent"
    said = {
        3: r"the batch has 3 rows in dimension 0, but the target is of shape \(8, ",
        2: f"rank 3 {nothing_sent}",
    }
    with pytest.raises((RuntimeError, ValueError), match=said.get(rank, f"another replica {nothing_sent}")):
        model.step(input[:3] if rank == 3 else input, target)
    torch.testing.assert_close(model.step(input, target), plain_step(MLP, mlp(), (input, target)))


def slices_of_a_mesh() -> None:
    """Pipelines of two slices of a mesh once met in one group, and waited for each other or raised errors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(mesh.get_local_rank("dp"))
    for _ in range(1 + mesh.get_local_rank("dp")):  # One slice makes a pipeline more than the other.
        plain = mlp()
        model = DistributedGPipe(copy.deepcopy(plain), [3, 3], mesh=mesh["pp"], **MLP.options)
        torch.testing.assert_close(model.step(*data(8)), plain_step(MLP, plain, data(8)))
        assert_gradients(model, plain)


def of_four() -> None:
    for schedule in ["GPipe", "1F1B"]:
        steps(MLP, schedule, [1, 2, 2, 1])
    for checkpoint in ["always", "except_last", "never"]:
        steps(EVERYTHING, "1F1B", [3, 3, 2, 4], checkpoint)
    steps(MLP, "1F1B", [3, 3], replicas=2)
    steps(EVERYTHING, "1F1B", [3, 9], "except_last", deferred=True, replicas=2)
    clipped()
    refused()
    slices_of_a_mesh()


@pytest.mark.parametrize(("n", "cases"), [(2, of_two), (4, of_four)])
def test_a_step_equals_that_of_the_plain_model(n: int, cases: Callable[[], None]) -> None:
    """Also with skips, batch norms, checkpoints, frozen layers, integer tensors, and replicas."""
    launch(n, cases, limit=120)
