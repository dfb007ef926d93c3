"""A model and a mini-batch, shared by the tests of gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from torchgpipe import GPipe

CHUNKS = 3
WIDTH = 4


def batch() -> Tensor:
    return torch.linspace(-2, 2, CHUNKS * 2 * WIDTH, dtype=torch.float64).reshape(-1, WIDTH).requires_grad_()


def model_of(pipe: Pipe, checkpoint: str, *layers: nn.Module) -> tuple[nn.Sequential, GPipe]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH)).double()
    return module, pipe(module, [1, len(layers) + 1], chunks=CHUNKS, checkpoint=checkpoint)
