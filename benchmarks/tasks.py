"""The models that are trained whole, and on what; `training.py` times them, `memory.py` counts their bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models import amoebanetd, gpt, resnet, resnet101, unet

__all__ = ["TASKS", "TINY", "Task", "inputs", "loss", "made", "mlp"]


class Task(NamedTuple):
    """A model to train, and on what.

    Attributes:
        make: makes the model
        sample: the shape of a sample: an image's, or one number, the length of a text
        batch: the size of a mini-batch
        chunks: the micro-batches that it is split into
    """

    make: Callable[[], nn.Sequential]
    sample: tuple[int, ...]
    batch: int
    chunks: int


def mlp(layers: int, width: int) -> nn.Sequential:
    """Return layers of few operations and parameters."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])


#: Micro-batches so small that all devices wait for the host: in cells of many operations, and of few.
TINY = {
    "gpt-tiny": Task(lambda: gpt(64, 4, 2, 8, 4), (4,), 32, 32),
    "mlp-tiny": Task(lambda: mlp(8, 16), (1, 16), 32, 32),
}

#: By size and name. The names are those of the architectures, however small they are made.
TASKS: dict[str, dict[str, Task]] = {
    "small": {
        "resnet101": Task(lambda: resnet((1, 1, 1), 10, width=16), (3, 64, 64), 16, 4),
        # So many small operations that a micro-batch takes more samples to be as efficient as those of the others.
        "amoebanetd": Task(lambda: amoebanetd(10, 3, 16), (3, 32, 32), 64, 4),
        "unet": Task(lambda: unet(2, 2, 8), (3, 32, 32), 16, 4),
        "gpt": Task(lambda: gpt(256, 4, 4, 64, 32), (32,), 16, 4),
        **TINY,
    },
    # What trains on one large GPU also without a pipeline.
    "gpu": {
        "resnet101": Task(resnet101, (3, 224, 224), 128, 8),
        "amoebanetd": Task(lambda: amoebanetd(1000, 18, 128), (3, 224, 224), 64, 8),
        "unet": Task(lambda: unet(5, 5, 64), (3, 192, 192), 32, 8),
        "gpt": Task(lambda: gpt(50257, 12, 12, 768, 1024), (1024,), 16, 8),
        **TINY,
    },
    # What torchgpipe has published, for several GPUs.
    "paper": {
        "resnet101": Task(resnet101, (3, 224, 224), 256, 32),
        "amoebanetd": Task(lambda: amoebanetd(1000, 18, 256), (3, 224, 224), 128, 32),
        "unet": Task(lambda: unet(5, 5, 64), (3, 192, 192), 64, 32),
        "gpt": Task(lambda: gpt(50257, 24, 16, 1024, 1024), (1024,), 64, 32),
        **TINY,
    },
    # For steps under a schedule: halves of the layers take the same time, and a micro-batch far more than the host.
    "step": {
        "mlp": Task(lambda: mlp(8, 512), (1, 512), 1024, 8),
        "gpt": Task(lambda: gpt(64, 4, 4, 128, 64), (64,), 32, 8),
    },
}


@lru_cache(maxsize=1)
def made(size: str, name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return TASKS[size][name].make()


def inputs(task: Task, batch: int, device: str) -> Tensor:
    """Return images, or tokens from the start of the vocabulary."""
    torch.manual_seed(0)
    if len(task.sample) == 1:
        return torch.randint(64, (batch, *task.sample)).to(device)
    return torch.rand(batch, *task.sample).to(device)


def loss(output: Tensor, _target: Tensor) -> Tensor:
    return output.square().mean()
