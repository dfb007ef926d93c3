"""The models of the benchmarks are those of the papers.

Parameters are counted on the meta device, where nothing is computed or stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.models import gpt, resnet101
from benchmarks.published_speed import FAMILIES


def parameters(model: Callable[..., nn.Sequential], *args: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model(*args).parameters())


def test_models_have_the_parameters_of_the_original() -> None:
    """GPT-2 small has 124,439,808 parameters if the head shares the embedding's."""
    assert parameters(gpt, 50257, 12, 12, 768, 1024) == 124_439_808 + 50257 * 768
    assert parameters(resnet101) == 44_549_160


def test_published_balances_are_of_the_layers_of_our_models() -> None:
    """Those of torchgpipe's speed benchmarks; an AmoebaNet-D has them in cells."""
    for family in FAMILIES:
        with torch.device("meta"):
            model = family.make()
        assert {sum(family.balance_of(model, experiment)) for experiment in family.experiments} == {len(model)}


def test_gpt_sees_no_later_token() -> None:
    module = gpt(vocabulary=11, layers=2, heads=2, width=8, context=5)
    tokens = torch.randint(11, (4, 5))
    changed = tokens.clone()
    changed[:, 3] = (tokens[:, 3] + 1) % 11
    before, after = module(tokens), module(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])
