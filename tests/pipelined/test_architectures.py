"""Real architectures, small and with random weights, give pipelined what they give plain.

Some of the catalogue, of other kinds than clients train in this folder, with one cut at random;
`python -m benchmarks.campaigns.architectures` tries all, in more ways.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from torch import Generator

from benchmarks.campaigns.architectures import CATALOGUE
from benchmarks.campaigns.architectures.precision import in_float64
from benchmarks.campaigns.architectures.trial import Way, pipeline, try_way
from tests.pipelined.helpers import TWO

for library in ("diffusers", "timm", "torchvision", "transformers"):
    pytest.importorskip(library)

#: The libraries' own, about their own.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NAMES = [name for name, architecture in CATALOGUE.items() if architecture.ci]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with in_float64():
        yield


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_gives_what_the_plain_model_gives(name: str) -> None:
    """By a step or by backward, in turns: `front/test_random_models.py` has any model in both ways."""
    step = NAMES.index(name) % 2 == 0
    result = try_way(CATALOGUE[name], CATALOGUE[name].build(), Way(step, tuple(TWO), balance=None, seed=1))
    assert result["verdict"] == "exact", result.get("trace")


@pytest.mark.parametrize("name", ["phi4_multimodal", "wan"])
def test_an_architecture_in_host_memory(name: str) -> None:
    """One that installs hooks when it runs first, and one whose blocks have parameters of their own."""
    way = Way(step=True, devices=tuple(TWO), schedule="LayerMajor")
    result = try_way(CATALOGUE[name], CATALOGUE[name].build(), way, offload=True)
    assert result["verdict"] == "exact", result.get("trace")


@pytest.mark.parametrize("step", [False, True], ids=["backward", "step"])
def test_a_contrastive_model_is_refused_by_the_name_of_what_couples_its_rows(step: bool) -> None:
    architecture = CATALOGUE["clip (contrastive)"]
    way = Way(step, tuple(TWO))
    with pytest.raises(ValueError, match="logits_per_image"):
        pipeline(architecture, copy.deepcopy(architecture.build()), way)
    model = pipeline(architecture, copy.deepcopy(architecture.build()), way, verify=False)
    _, batch = architecture.inputs(5, Generator().manual_seed(0))
    with pytest.raises(ValueError, match="logits_per_image"):
        model.step(**batch) if step else model(**batch)
