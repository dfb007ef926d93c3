"""The models of the benchmarks are those of the papers.

Parameters are counted on the meta device, where nothing is computed or stored.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.models import amoebanetd, gpt, resnet101, unet
from benchmarks.models.amoebanet import cells


def parameters(model: Callable[..., nn.Sequential], *args: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model(*args).parameters())


def test_models_have_the_parameters_of_the_original() -> None:
    """GPT-2 small has 124,439,808 parameters if the head shares the embedding's."""
    assert parameters(gpt, 50257, 12, 12, 768, 1024) == 124_439_808 + 50257 * 768
    assert parameters(resnet101) == 44_549_160


def test_published_balances_are_of_the_layers_of_our_models() -> None:
    """Those of torchgpipe's speed benchmarks on two, four and eight GPUs; an AmoebaNet-D has them in cells."""
    with torch.device("meta"):
        sizes = len(resnet101()), len(unet(5, 5, 64)), len(cells(amoebanetd(1000, 18, 256)))
    published = (
        ([135, 235], [44, 92, 124, 110], [26, 22, 33, 44, 44, 66, 66, 69]),
        ([104, 137], [30, 66, 84, 61], [16, 27, 31, 44, 22, 57, 27, 17]),
        ([9, 15], [3, 6, 7, 8], [2, 2, 2, 3, 3, 4, 4, 4]),
    )
    assert [{sum(balance) for balance in balances} for balances in published] == [{size} for size in sizes]


def test_what_is_doubled_of_an_odd_size_meets_its_skip() -> None:
    assert unet(2, 1, 4)(torch.rand(2, 3, 9, 10)).shape == (2, 1, 9, 10)


def test_amoebanets_are_not_made_of_sizes_that_do_not_divide() -> None:
    for arguments, says in (((10, 4, 16), "multiple of 3, but is 4"), ((10, 3, 12), "multiple of 8, but is 12")):
        with pytest.raises(ValueError, match=says):
            amoebanetd(*arguments)


def test_gpt_sees_no_later_token() -> None:
    module = gpt(vocabulary=11, layers=2, heads=2, width=8, context=5)
    tokens = torch.randint(11, (4, 5))
    changed = tokens.clone()
    changed[:, 3] = (tokens[:, 3] + 1) % 11
    before, after = module(tokens), module(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])
