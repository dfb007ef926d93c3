"""If a process fails, dies or hangs, all others raise, naming themselves and the process that they were waiting for.

`launch` fails if the processes exceed its limit. No test asserts a time.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.distributed.launch import launch
from tests.distributed.models import data, mlp
from torchgpipe.distributed import DistributedGPipe

pytestmark = pytest.mark.slow


class Faulty(nn.Module):
    """A layer that harms one process after ``after`` micro-batches."""

    def __init__(self, kind: str, victim: int, after: int) -> None:
        super().__init__()
        self.kind, self.victim, self.left = kind, victim, after

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor) and dist.get_rank() == self.victim:
            self.left -= 1
            if self.left < 0:
                harm(self.kind)
        return x


def harm(kind: str) -> None:
    if kind == "raises":
        raise ArithmeticError("out of luck")
    if kind == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def learn(balance: list[int], layers: dict[int, Faulty], **options: Any) -> str:
    """Return the error of this process, in a pipeline with these layers, one of which harms its process."""
    plain = mlp()
    for place, layer in layers.items():
        plain.insert(place, layer)
    model = DistributedGPipe(plain, balance, chunks=4, loss_fn=F.mse_loss, checkpoint="never", **options)
    with pytest.raises((RuntimeError, ArithmeticError)) as info:
        for step in range(9):
            model.step(*data(8 + step))
    said = "\n".join([type(info.value).__name__, str(info.value), *info.value.__notes__])
    if said.startswith("ArithmeticError"):
        assert "ArithmeticError\nout of luck\nmicro-batch 2 of 4, partition 2 (layers '4'..'5')" in said
        assert said.endswith("rank 2, stage 2 of 4 at step 2")
        os._exit(1)  # A program that does not catch the error ends like this.
    return said


def check(said: list[str], victim: int, step: int) -> None:
    for rank, text in enumerate(said):
        if rank == victim:
            continue
        said_by = r"rank (\d), stage (\d).*? has waited in step (\d+) for .*? from rank ([\d, ]+), in vain"
        match = re.search(said_by, text)
        assert match, text
        assert (int(match[1]), int(match[3])) == (rank, step), text
        assert str(rank) not in match[4], text
        assert "start all of them again from the last checkpoint" in text


#: What happens, to which process, after how many micro-batches, the step, and a neighbour.
FAULTS = [("is killed", 0, 9, 3, 1), ("is killed", 3, 9, 3, 2), ("raises", 2, 6, 2, 3)]


@pytest.mark.parametrize(("kind", "victim", "after", "step", "neighbour"), FAULTS)
def test_all_others_end(kind: str, victim: int, after: int, step: int, neighbour: int) -> None:
    layer = {[1, 3, 4, 6][victim]: Faulty(kind, victim, after)}
    said = launch(4, learn, [2, 2, 2, 1], layer, victim=victim)
    check(said, victim, step)
    assert kind != "is killed" or re.search(rf"from rank ([\d, ]*, )?{victim}[ ,]", said[neighbour]), said


def learn_in_replicas() -> str:
    mesh, timeout = init_device_mesh("cpu", (2, 2)), timedelta(seconds=3)
    return learn([2, 5], {6: Faulty("hangs", 3, 5)}, mesh=mesh, timeout=timeout)


def test_all_others_end_when_one_of_a_replica_hangs() -> None:
    said = launch(4, learn_in_replicas, victim=3)
    check(said, 3, step=2)
    assert "in replica 0" in said[0]


def learn_and_vanish() -> str:
    model = DistributedGPipe(mlp(), [2, 2, 1, 1], chunks=4, loss_fn=F.mse_loss)
    with pytest.raises(RuntimeError) as info:
        for step in range(9):
            if step == 2 and dist.get_rank() == 2:
                harm("is killed")
            model.step(*data(8))
    return str(info.value)


def test_all_others_end_when_one_is_killed_between_steps() -> None:
    said = launch(4, learn_and_vanish, victim=2)
    check(said, 2, step=3)
    assert all("whether all are ready" in said[rank] for rank in (0, 1, 3))


def learn_interleaved() -> str:
    layers = {1: Faulty("is killed", 1, 0), 3: Faulty("is killed", 1, 5)}
    return learn([2, 2, 2, 2], layers, schedule="Interleaved1F1B")


def test_interleaved_stages_tell_as_well() -> None:
    said = launch(2, learn_interleaved, victim=1)
    match = re.search(r"rank 0, stage 0, 2 of 4 has waited in step 2 for .* from rank 1, in vain", said[0])
    assert match, said[0]
