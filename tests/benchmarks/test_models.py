"""The models of the benchmarks are those of the papers, and a pipeline trains them like any other model.

Parameters are counted on the meta device, where nothing is computed or stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import gpt, resnet, resnet101, unet
from tests.conftest import Pipe
from tests.plain import outcome, plain_outcome

Made = tuple[nn.Sequential, Tensor]


def image(*size: int) -> Tensor:
    return torch.rand(4, 3, *size, dtype=torch.float64)


TINY: dict[str, Callable[[], Made]] = {
    "resnet": lambda: (resnet([2, 1], num_classes=3, width=2).double(), image(16, 16)),
    "unet": lambda: (unet(2, num_convs=2, base_channels=2).double(), image(9, 10)),
    "gpt": lambda: (gpt(vocabulary=11, layers=2, heads=2, width=8, context=5).double(), torch.randint(11, (4, 5))),
}


@pytest.fixture(params=TINY.values(), ids=TINY.keys())
def tiny(request: pytest.FixtureRequest) -> Made:
    """Return a small model of each kind, with an input."""
    made: Made = request.param()
    return made


def even(layers: int, partitions: int) -> list[int]:
    return [layers * (j + 1) // partitions - layers * j // partitions for j in range(partitions)]


def parameters(model: Callable[..., nn.Sequential], *args: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model(*args).parameters())


@pytest.mark.parametrize(
    "model, arguments, millions",
    [
        (unet, (5, 6, 72), 362.2),
        (unet, (5, 24, 160), 7800),
    ],
)
def test_models_have_the_parameters_of_the_original(
    model: Callable[..., nn.Sequential], arguments: tuple[int, ...], millions: float
) -> None:
    assert round(parameters(model, *arguments) / 1e6, 1 if millions < 1000 else -1) == millions


def test_gpt_has_the_parameters_of_gpt2_and_a_head_and_resnet101_its_own() -> None:
    """GPT-2 small has 124,439,808 parameters if the head shares the embedding's."""
    assert parameters(gpt, 50257, 12, 12, 768, 1024) == 124_439_808 + 50257 * 768
    assert parameters(resnet101) == 44_549_160


def test_gpt_sees_no_later_token() -> None:
    module, tokens = TINY["gpt"]()
    changed = tokens.clone()
    changed[:, 3] = (tokens[:, 3] + 1) % 11
    before, after = module(tokens), module(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])


@pytest.mark.parametrize(
    "variant, checkpoint",
    [("inline", "never"), ("workers", "always"), ("workers", "except_last")],
    indirect=["variant"],
)
def test_a_pipeline_trains_models_like_plain_ones(tiny: Made, pipe: Pipe, checkpoint: str) -> None:
    """Batch norms are in training mode, so their statistics are compared as well.

    Results are not equal to the last bit: where three layers take a tensor, its gradient is a sum of three terms, in an
    order that depends on the ends of partitions.
    """
    module, input = tiny
    copied = copy.deepcopy(module)
    expected = plain_outcome(module, input, chunks=2)
    model = pipe(copied, even(len(copied), 4), chunks=2, checkpoint=checkpoint)
    torch.testing.assert_close(vars(outcome(model, input)), vars(expected), rtol=1e-9, atol=1e-9)
