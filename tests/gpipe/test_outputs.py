"""Outputs: nested values at boundaries and at the end, and outputs that cannot be gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Pipe
from tests.gpipe.helpers import assert_transparent, make_input, make_model
from tests.layers import Apply


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: (x,),
        lambda x: (x, x + 1),
        lambda x: [x, None],
        lambda x: {"x": x, "parts": (x * 2, [x > 0])},
        lambda x: (x.detach(), x.argmax(1), x),
        lambda x: (x, x),
        lambda x: (x.view(-1, 1), x.t().t()),
        lambda x: {"nothing": None, "x": (x, ())},
    ],
)
def test_nested_outputs_at_boundaries_and_at_the_end(pipe: Pipe, nest: Callable[[Tensor], Any]) -> None:
    for chunks in [1, 2, 4]:
        assert_transparent(pipe, nn.Sequential(*make_model(2), Apply(nest)), [1, 2], make_input(5), chunks=chunks)
        module = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), Apply(nest), nn.Identity())
        assert_transparent(pipe, module, [1, 1, 1], make_input(5), chunks=chunks)


def test_none_is_an_output(pipe: Pipe) -> None:
    assert pipe(nn.Sequential(Apply(lambda x: None)), [1], chunks=2)(make_input()) is None
    module = nn.Sequential(Apply(lambda x: None), Apply(lambda x: torch.ones(1)))
    assert torch.equal(pipe(module, [1, 1], chunks=2)(make_input()), torch.ones(2))


def test_micro_batches_may_come_out_in_other_sizes(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(nn.Identity(), Apply(lambda x: x.sum(0, keepdim=True))), [1, 1], chunks=3)
    assert model(make_input()).shape == (3, 2)


def test_an_output_without_dimensions_cannot_be_gathered(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(Apply(torch.sum)), [1], chunks=2)
    with pytest.raises(ValueError, match="dimension"):
        model(make_input())


def test_outputs_of_different_structure_cannot_be_gathered(pipe: Pipe) -> None:
    model = pipe(nn.Sequential(Apply(lambda x: (x, x) if len(x) == 2 else x)), [1], chunks=2, checkpoint="never")
    with pytest.raises(ValueError, match="structure"):
        model(make_input(3))
