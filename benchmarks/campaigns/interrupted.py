"""The child of faults.py: a training run that comes to harm, and that torchrun starts again.

It trains a Sequential by DistributedGPipe, or a model that is none by `pipelined`, and writes one line for each step
that it has made, and one for each error that ends a process. The harm comes once, in the first of the runs: to one
process, at one step, in forward or backward of a layer, while it saves, or between steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import torchgpipe
from torchgpipe.distributed import Checkpoints, DistributedGPipe

__all__ = ["STEPS", "TIMEOUT", "Harm", "main", "note", "train"]

STEPS = 12
EVERY = 3  # steps between two checkpoints
TIMEOUT = 5.0  # seconds that a process waits for another


class Harm(NamedTuple):
    """What happens.

    Attributes:
        kind: 'raise', 'kill' or 'hang'; 'none' for an uninterrupted run
        place: 'layer', 'backward', 'save' or 'between'
        rank: to whom
        step: when
        model: what is trained: 'sequential' or 'any'
    """

    kind: str
    place: str = "layer"
    rank: int = 0
    step: int = 0
    model: str = "sequential"

    def strike(self, place: str, step: int) -> None:
        """Do harm if this is the place, the process and the step."""
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if not first or (place, step, dist.get_rank()) != (self.place, self.step, self.rank):
            return
        if self.kind == "raise":
            raise ArithmeticError("out of luck")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "hang":
            threading.Event().wait()


class Layer(nn.Linear):
    """A layer with something random, which counts steps, and may come to harm in one."""

    harm = Harm("none")
    step = -1  # The sample runs before the first step.

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:  # It stands for one of another process.
            return super().forward(x).tanh()
        self.harm.strike("layer", self.step)
        y = super().forward(x).tanh()
        if y.requires_grad:
            y.register_hook(lambda _: self.harm.strike("backward", self.step))
        return F.dropout(y, 0.2, self.training)


class Residual(nn.Module):
    """A model that is no Sequential: what is between its layers runs in every process."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer(8, 8) for _ in range(count)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, target)


class FragileCheckpoints(Checkpoints):
    """Do the harm when a process has written its file, and has not yet told the others."""

    harm = Harm("none")
    step = 0

    def _write_file(self, *args: Any) -> None:
        super()._write_file(*args)
        self.harm.strike("save", self.step)


def build(model: str) -> Any:
    """Return the model in this process."""
    n = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if model == "sequential":
            layers = nn.Sequential(*[Layer(8, 8) for _ in range(2 * n)])
            return DistributedGPipe(layers, [2] * n, chunks=4, loss_fn=F.mse_loss)
        sample, mesh = tuple(torch.rand(2, 4, 8)), init_device_mesh("cpu", (n,))
        return torchgpipe.pipelined(Residual(2 * n), sample, chunks=4, balance="parameters", mesh=mesh)


def train(folder: Path, harm: Harm) -> None:
    """Train to the end, from the last checkpoint."""
    model = build(harm.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpoints = FragileCheckpoints(folder / "checkpoints", model, optimizer, timeout=timedelta(seconds=TIMEOUT))
    Layer.harm = checkpoints.harm = harm

    begin = (checkpoints.load() or {"step": 0})["step"]
    for step in range(begin, STEPS):
        Layer.step = step
        draw = torch.Generator().manual_seed(step)
        input, target = torch.rand(2, 10, 8, generator=draw)
        loss = model.step(input, target)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            note(folder / "steps", begin=begin, step=step, loss=loss.item())
        harm.strike("between", step)
        if (step + 1) % EVERY == 0:
            checkpoints.wait()
            checkpoints.step = step
            # Every second one in the background.
            checkpoints.save(step + 1, {"step": step + 1}, asynchronous=step % 2 == 0)
    checkpoints.wait()


def note(path: Path, **fields: Any) -> None:
    """Add a line to a file."""
    with path.open("a") as file:
        print(json.dumps(fields), file=file)


def main() -> None:
    """Train in the folder of the first argument, with the harm of the second, a list in JSON."""
    folder, harm = Path(sys.argv[1]), Harm(*json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    note(folder / f"processes-{dist.get_rank()}", pid=os.getpid())
    try:
        train(folder, harm)
    except Exception as error:
        note(folder / f"errors-{dist.get_rank()}", error=str(error), notes=getattr(error, "__notes__", []))
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
