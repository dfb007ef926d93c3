"""The memory of a training step is counted in a process that does nothing else."""

from __future__ import annotations

import pytest
import torch

from benchmarks.capacity import LADDERS
from benchmarks.footprint import MAKERS
from benchmarks.peers import Peer, Request

pytestmark = pytest.mark.slow


def test_a_footprint_is_the_model_and_what_the_step_needs_beside_it() -> None:
    request: Request = {
        "model": "gpt",
        "args": [64, 4, 2, 16, 16],
        "sample": [16],
        "batch": 32,
        "m": 8,
        "balance": [6, 5],
        "devices": ["cpu", "cpu"],
    }
    with Peer("ours", "footprint.py") as peer:
        always, never = (peer.ask({**request, "mode": mode}) for mode in ("always", "never"))
        again = peer.ask({**request, "mode": "always"})
    with torch.device("meta"):
        parameters = list(MAKERS["gpt"](*request["args"]).parameters())
    count = sum(parameter.numel() for parameter in parameters)
    assert always["parameters"] == count
    # Memory holds each parameter, its gradient and RMSprop's mean, and one number per parameter: RMSprop's step count.
    assert always["kept"] == never["kept"] == [3 * 4 * count + 4 * len(parameters)]
    for answer in (always, never):
        assert answer["peak"] == [answer["kept"][0] + answer["activations"][0]]
    assert always["activations"][0] < never["activations"][0] / 2
    assert again == always


@pytest.mark.parametrize("size", LADDERS)
@pytest.mark.parametrize("model", ["amoebanetd", "unet"])
def test_a_ladder_climbs(size: str, model: str) -> None:
    ladder = LADDERS[size][model]
    counts = []
    for step in ladder.sizes[:3]:
        with torch.device("meta"):
            module = MAKERS[model](*ladder.arguments(step))
        counts.append(sum(parameter.numel() for parameter in module.parameters()))
    assert counts == sorted(set(counts))
