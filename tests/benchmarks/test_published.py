"""What the papers have published is of the models that we have, and what is counted beside it is right."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks.kept_on_meta import Kept, kept_by_partitions
from benchmarks.models.resnet import Add
from benchmarks.models.skips import Stash, joined
from benchmarks.published_memory import EXPERIMENTS, FAMILIES, Experiment
from benchmarks.records import GIB
from torchgpipe.skip import Namespace


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: f"{one.model}{one.size}")
def test_models_have_the_published_parameters_and_balances(experiment: Experiment) -> None:
    """AmoebaNet-D from (18, 208) to (72, 512) has 81.5M, 319.0M, 542.7M, 1.06B and 1.84B."""
    model = experiment.on_meta()
    count = sum(parameter.numel() for parameter in model.parameters())
    printed, published = experiment.published.parameters, experiment.published.model
    assert (f"{count / 1e6:.1f}M" if printed.endswith("M") else f"{count / 1e9:.2f}B") == printed
    assert sum(experiment.balance_of(model)) == len(model)
    if published is not None:
        assert round(4 * FAMILIES[experiment.model].copies * count / GIB, 2) == published


def test_kept_are_inputs_with_what_comes_through_a_portal_and_what_layers_save() -> None:
    """Five rows of four numbers, and of six behind the first Linear; Tanh saves its output."""
    ns = Namespace()
    layers = nn.Sequential(
        joined(Stash(), ns),
        nn.Linear(4, 6, bias=False),
        nn.Tanh(),
        joined(Add(nn.Linear(4, 6, bias=False)), ns),
    ).to("meta")
    apart = [Kept(4 * 24, 4 * 5 * 4, 4 * 5 * 6), Kept(4 * 24, 4 * 5 * 6 + 4 * 5 * 4, 0)]
    assert kept_by_partitions(layers, (4,), [3, 1], rows=5) == apart
    assert kept_by_partitions(layers, (4,), [4], rows=5) == [Kept(4 * 48, 4 * 5 * 4, 4 * 5 * 6)]
    with pytest.raises(ValueError, match="the balance has 3 layers, but the model 4"):
        kept_by_partitions(layers, (4,), [3], rows=5)
