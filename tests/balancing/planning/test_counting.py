"""What layers keep for backward is counted exactly, each memory once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.balancing.planning.models import WIDTH, mlp
from torchgpipe_balancing.planning.counting import count_bytes
from torchgpipe_balancing.planning.model_under_test import Config, prepare_model
from torchgpipe_balancing.planning.problem import Layer

ROWS = 3
#: Bytes of a micro-batch between two layers.
X = ROWS * WIDTH * 4


def bytes_of(model: nn.Module, sample: Any, rows: int = ROWS, **options: Any) -> list[Layer]:
    """Return what is counted in a pipeline with a partition a layer, as plans count it; on meta, without one."""
    tested = prepare_model(model, sample, None, 2, options)
    n = len(tested.layers)
    _, step = tested.pipeline(Config([1] * n, [torch.device("cpu", 2 * k // n) for k in range(n)], 1))
    return count_bytes(tested, partial(step, rows))


def test_a_linear_layer_and_a_relu() -> None:
    """ReLU keeps its output, which is the input that the next linear layer keeps."""
    assert bytes_of(mlp(3), torch.randn(2, WIDTH)) == [
        Layer(kept=X, again=0, input=X, waiting=X, crossing=X),
        Layer(kept=X, again=X, input=2 * X, waiting=X, crossing=X),
        # The loss keeps nothing of the output.
        Layer(kept=X, again=X, input=X, waiting=X, crossing=0),
    ]


def test_convolutions() -> None:
    """A convolution keeps its input; a batch norm its input and two numbers a channel; a pool its input and indices."""
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Flatten(), nn.Linear(4 * 16, 5)),
    ]
    image = ROWS * 4 * 64 * 4
    pooled = image // 4
    found = bytes_of(nn.Sequential(*layers), torch.randn(2, 3, 8, 8))
    assert [one.kept for one in found] == [
        0,  # The mini-batch is the caller's.
        image + 2 * 4 * 4,
        image,
        2 * pooled,  # Indices take 8 bytes an element; ReLU keeps the input of the pool.
        pooled,
    ]
    assert [one.again for one in found] == [0, 0, 0, image, 0]
    assert [one.crossing for one in found] == [image, image, image, pooled, 0]
    assert [one.waiting for one in found] == [image, image, 0, 0, ROWS * 5 * 4]


def test_what_all_blocks_use_is_kept_once_and_again_where_it_is_used() -> None:
    """Each partition has a copy of its own of a skip that several layers keep."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            x = scale = self.blocks[0](x)
            for block in list(self.blocks)[1:]:
                x = block(x * scale)  # Both factors are kept, and the product.
            return x

    found = bytes_of(Scaled(), torch.randn(2, WIDTH))
    # x * scale runs at the end of the part before; in the first, x and scale are one memory.
    assert [one.kept for one in found] == [X, 2 * X, 2 * X, X]
    assert [one.again for one in found] == [0, X, X, 0]
