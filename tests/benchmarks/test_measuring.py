"""What benchmarks measure and compute is what they say."""

from __future__ import annotations

import pytest
import torch

from benchmarks import schedules
from benchmarks.cost import ideal_speed_up
from benchmarks.memory_footprint import MAKERS
from benchmarks.peers import Peer, Request
from benchmarks.schedules import NAMES, WAYS
from benchmarks.tasks import TASKS, inputs
from benchmarks.training_steps import runner
from tests.benchmarks.test_benchmarks import Silent

pytestmark = pytest.mark.slow


def request(model: str, devices: list[str], balance: list[int] | None = None) -> Request:
    about = {"size": "small", "model": model, "batch": 4, "m": 2, "mode": "except_last"}
    return {**about, "devices": devices, "balance": balance, "warm_up": 0, "steps": 1}


def test_the_ideal_is_the_clocks_in_which_a_device_works() -> None:
    assert ideal_speed_up(1, 8, "never") == 1
    assert ideal_speed_up(4, 1, "never") == 1  # one micro-batch: one device works after the other
    assert ideal_speed_up(4, 5, "never") == 4 * 5 / 8
    assert ideal_speed_up(1, 8, "always") == 3 / 4  # two forwards and a backward, which takes as long as two forwards
    assert ideal_speed_up(1, 8, "always", forward=1 / 2) == 2 / 3  # a backward as long as one forward
    assert ideal_speed_up(1, 1, "except_last") == 1
    assert ideal_speed_up(2, 10**6, "never") == pytest.approx(2)


# ---- Memory.


def test_a_footprint_is_the_model_and_what_the_step_needs_beside_it() -> None:
    """It is counted in a process that does nothing else."""
    shape = {"kind": "footprint", "model": "gpt", "args": [64, 4, 2, 16, 16], "sample": [16], "batch": 32, "m": 8}
    asked = {**shape, "balance": [6, 5], "devices": ["cpu", "cpu"]}
    with Peer("ours", "memory_footprint.py") as peer:
        always, never = (peer.ask({**asked, "mode": mode}) for mode in ("always", "never"))
        again = peer.ask({**asked, "mode": "always"})
    with torch.device("meta"):
        parameters = list(MAKERS["gpt"](64, 4, 2, 16, 16).parameters())
    count = sum(parameter.numel() for parameter in parameters)
    assert always["parameters"] == count
    # Memory holds each parameter, its gradient and RMSprop's mean, and one number per parameter: RMSprop's step count.
    assert always["kept"] == never["kept"] == [3 * 4 * count + 4 * len(parameters)]
    for answer in (always, never):
        assert answer["peak"] == [answer["kept"][0] + answer["activations"][0]]
    assert always["activations"][0] < never["activations"][0] / 2
    assert again == always


@pytest.mark.parametrize(
    "asked",
    [*({"schedule": name, "mode": "never"} for name in NAMES), *({"way": way} for way in WAYS)],
    ids=lambda asked: asked.get("schedule") or f"pipelined {asked['way']}",
)
def test_saved_activations_are_those_of_the_simulation(asked: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "reports", Silent)
    monkeypatch.setattr(schedules, "ROWS", 2)
    answer = schedules.answer("ours", {"n": 4, "m": 6, "steps": 2, **asked})
    assert answer["same_each_step"]
    assert all(saved <= simulated for saved, simulated in zip(answer["saved"], answer["simulated"], strict=True))
    assert max(answer["saved"]) == max(answer["simulated"])


# ---- Whole models.


@pytest.mark.parametrize("model", TASKS["small"])
def test_every_way_computes_the_same(model: str) -> None:
    torch.manual_seed(0)
    module = TASKS["small"][model].make().eval()
    x = inputs(TASKS["small"][model], 4, "cpu")
    asked = request(model, ["cpu", "cpu"], [len(module) - 3, 3])
    with torch.no_grad():
        plain, ours = (runner(peer, module, asked)(x) for peer in ("plain", "ours"))
    torch.testing.assert_close(ours, plain)
