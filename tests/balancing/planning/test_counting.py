"""What layers keep for backward is counted exactly, each memory once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.balancing.planning.models import WIDTH, mlp
from torchgpipe_balancing.planning.counting import count_bytes
from torchgpipe_balancing.planning.model_under_test import Config, ModelUnderTest
from torchgpipe_balancing.planning.problem import Layer

ROWS = 3
#: Bytes of a micro-batch between two layers.
X = ROWS * WIDTH * 4


def bytes_of(model: nn.Module, sample: Any, rows: int = ROWS, **options: Any) -> list[Layer]:
    """Return what is counted in a pipeline with a partition a layer, as plans count it; on meta, without one."""
    tested = ModelUnderTest(model, sample, None, 2, options)
    n = len(tested.layers)
    _, step = tested.pipeline(Config([1] * n, [torch.device("cpu", 2 * k // n) for k in range(n)], 1))
    return count_bytes(tested, partial(step, rows))


def test_a_linear_layer_and_a_relu() -> None:
    """ReLU keeps its output, which is the input that the next linear layer keeps.

    That is kept, too, where the layer of the ReLU is recomputed. It was once counted for both layers.
    """
    assert bytes_of(mlp(3), torch.randn(2, WIDTH)) == [
        Layer(kept=X, again=0, input=X, waiting=X, crossing=X),
        Layer(kept=X, again=X, input=X, waiting=X, crossing=X),
        # The loss keeps nothing of the output.
        Layer(kept=X, again=X, input=0, waiting=X, crossing=0),
    ]


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
    # Where all are recomputed, the skip and the products are.
    assert [one.input for one in found] == [X, X, X, X]
