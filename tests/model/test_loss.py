"""The loss of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.layers import Chain
from torchgpipe import GPipe, pipelined


@pytest.mark.parametrize(
    "made",
    [
        lambda **options: GPipe(nn.Sequential(*Chain().layers), [1, 1], devices=["cpu", "cpu"], **options),
        lambda **options: pipelined(Chain(), torch.randn(2, 2), devices=["cpu", "cpu"], partitions=2, **options),
    ],
    ids=["GPipe", "pipelined"],
)
@pytest.mark.parametrize(
    "options",
    [{"loss_fn": functional.mse_loss}, {"loss_fn": lambda output, _: output.mean(), "weight": len}],
    ids=["loss_fn", "weight"],
)
def test_a_loss_that_misses_its_target_says_so(made: Callable[..., Any], options: dict[str, Any]) -> None:
    """In ``step(x, y)`` of a pipelined model, y once was an argument of the model, and the error one of None."""
    model, x = made(chunks=2, **options), torch.randn(4, 2)
    with pytest.raises((AttributeError, TypeError)) as raised:
        model.step(x)
    assert raised.value.__notes__[0] == "no target was given: step(..., target=y)"
    model.step(x, target=x)
