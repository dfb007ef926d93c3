"""What the proof and the check of crossings find of a model over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchgpipe
from tests.distributed.launch import launch
from torchgpipe.processes.messages import Messages

pytestmark = pytest.mark.slow


class Blocks(nn.Module):
    """Blocks with a skip, which only one process knows if ``differs`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.differs = False

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x).tanh()
        return x if self.differs and dist.get_rank() == 1 else x + first


def made() -> Any:
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (2,))
    return torchgpipe.pipelined(Blocks(), torch.randn(2, 4), chunks=4, mesh=mesh, balance=[2, 2])


def said(is_wrong: bool) -> str:
    """Return the table of a model, or what the proof says if a process gets wrong gradients from the other one."""
    receive = Messages.receive

    def receive_wrong(self: Messages, source: int, key: str, *args: Any, **kwargs: Any) -> Any:
        told = receive(self, source, key, *args, **kwargs)
        return [1.001 * grad for grad in told] if key.startswith("gradients") else told

    if is_wrong and dist.get_rank() == 0:
        Messages.receive = receive_wrong  # type: ignore[method-assign]
    try:
        model = made()
    except ValueError as error:
        return str(error)
    with pytest.raises(RuntimeError, match=r"each process has a part of the model: use model.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # Once, each process scaled by the norm of its own.
    return str(model.verify(torch.randn(6, 4)))


def test_what_one_process_finds_all_refuse() -> None:
    for text in launch(2, said, True):
        assert "the gradient of 'blocks.0.weight' in partition 0" in text
        assert "is not that of the plain model" in text
    one, other = launch(2, said, False)
    assert one == other  # The table has the gradients of both.
    assert "blocks.0.weight" in one and "blocks.3.weight" in one


def differing() -> str:
    model = made()
    model.differs = True
    with pytest.raises(RuntimeError) as info:
        model(torch.randn(8, 4))
    return str(info.value)


def test_a_forward_that_differs_between_processes_is_found() -> None:
    for text in launch(2, differing):
        assert (
            "processes have come to other crossings in micro-batch 0 (number 1: process 0: (2, 4) torch.float32 with a "
            in text
        )
        assert "partition 0 to 1; process 1: nothing)" in text


class Stray(Blocks):
    """Fails in one process, or in all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.runs = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        ill = {"raises": 1, "raises in the plain run": 0, "raises in the pipeline": 1}.get(self.kind)
        if dist.get_rank() == ill and (self.kind == "raises" or self.runs > 1):
            raise ValueError("this process is ill")
        for block in self.blocks:
            x = block(x).tanh()
        return Ill.apply(x) if self.kind == "raises in backward" else x


class Ill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("this backward is ill")


def strayed() -> list[str]:
    """Return what processes say that stray in different ways."""
    mesh = dist.init_device_mesh("cpu", (2,))
    how: dict[str, Any] = {"chunks": 4, "mesh": mesh, "balance": [2, 2]}
    said = []
    for kind in ("raises", "raises in the plain run", "raises in the pipeline"):
        torch.manual_seed(0)
        with pytest.raises((RuntimeError, ValueError)) as info:
            torchgpipe.pipelined(Stray(kind), torch.randn(2, 4), **how)
        said.append(str(info.value))
    torch.manual_seed(0)
    # Which a model may do that only evaluates.
    with pytest.warns(UserWarning, match="not compared: gradients, because the plain model cannot be differ"):
        model: Any = torchgpipe.pipelined(Stray("raises in backward"), torch.randn(2, 4), **how)
    model.kind = "raises in the plain run"
    with pytest.raises((RuntimeError, ValueError), match="this process is ill"):
        model.verify(torch.randn(4, 4))
    model.kind = ""
    assert model.verify(torch.randn(4, 4)).is_equal  # The processes go on.
    return said


def test_a_process_that_strays_from_the_proof_is_found_at_once() -> None:
    one, other = launch(2, strayed)
    assert "rank 1 has failed before the partitions: ValueError: this process is ill" in one[0]
    assert other[0] == "this process is ill"
    assert "rank 0 has failed before the proof: ValueError: this process is ill" in other[1]
    assert one[1] == "this process is ill"
    assert "a micro-batch fails in the pipeline (ValueError: this process is ill)" in other[2]
    assert "in vain: rank 1 has failed with ValueError: this process is ill" in one[2]


class Tied(nn.Module):
    """A table at both ends, whose copies in two processes once stayed different if the seeds were."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def seeded() -> list[Any]:
    """Train in processes whose models, samples or mini-batches were made under seeds of their own."""
    rank, mesh = dist.get_rank(), dist.init_device_mesh("cpu", (2,))
    how: dict[str, Any] = {"chunks": 2, "mesh": mesh, "loss_fn": lambda output, _: output.square().mean()}
    results: list[Any] = []
    for differ in ("models", "samples", "mini-batches"):
        torch.manual_seed(rank if differ == "models" else 0)
        model: Any = Tied()
        torch.manual_seed(rank if differ == "samples" else 0)
        sample = torch.randint(8, (4, 3))
        try:
            torchgpipe.pipelined(model, sample, verify=False, **how)
            torch.manual_seed(rank if differ == "mini-batches" else 0)
            model.step(torch.randint(8, (4, 3)))
            results.append(model.table.weight.tolist())
        except (ValueError, RuntimeError) as error:
            results.append(str(error))
    return results


def test_seeds_that_differ_between_processes() -> None:
    one, other = launch(2, seeded)
    assert one[0] == other[0]
    for texts in (one, other):
        assert "has another sample than this process" in texts[1]
        assert "prepares another step: it has other values in its arguments: seed what shuffles" in texts[2]
