"""What benchmarks measure and compute is what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import plan, schedules
from benchmarks.cost import ideal_speed_up
from benchmarks.mechanisms import places
from benchmarks.memory_footprint import MAKERS
from benchmarks.peers import Peer, Request
from benchmarks.pytorch_pipelines import answer as pytorch_answer
from benchmarks.records import spread
from benchmarks.schedules import NAMES, WAYS
from benchmarks.tasks import TASKS, inputs
from benchmarks.training_speed import targets
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


def test_cpus_are_numbered_where_copies_are_measured() -> None:
    assert places(["cpu"], 2) == ["cpu:0", "cpu:1"], "each partition has a device to copy to"
    assert places(["cuda:0", "cpu"], 2) == ["cuda:0", "cpu"]


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


def test_targets_are_held_against_the_limit_and_the_original() -> None:
    def row(experiment: str, mode: str, **peers: object) -> dict[str, object]:
        about = {"model": "resnet", "experiment": experiment, "mode": mode, "ideal": ideal_speed_up(1, 4, "always")}
        return {**about, **peers}

    def answer(seconds: float, original: float) -> dict[str, object]:
        ratios = {"speed-up": spread([1 / seconds]), "over original": spread([original])}
        return {"throughput": {}, "seconds": [seconds], **ratios}

    reached = targets(
        [
            row("pipeline-1", "always", ours=answer(1.6, 1.1)),
            row("pipeline-1", "never", ours=answer(1.0, 0.9)),
        ]
    )
    found = [(one["aim"], one["where"], round(one["reached"]["median"], 3), one["met"]) for one in reached]
    assert found == [
        ("limit", "pipeline-1, always", round(1 / 1.6 / 0.75, 3), False),
        ("limit", "pipeline-1, never", round(1 / 0.75, 3), True),
        ("original", "pipeline-1, always", 1.1, True),
        ("original", "pipeline-1, never", 0.9, False),
    ]


# ---- Plans.


def test_aims_name_the_models_that_are_far_off() -> None:
    def row(name: str, predicted: float, counted: float) -> dict[str, Any]:
        turn = {"layers": 3, "batch": 8, "predicted": predicted, "measured": 1.0}
        turn |= {"predicted_bytes": [100.0, 0.0], "measured_bytes": [counted, 0.0]}
        return plan.row({"family": name, "seed": 0}, [turn])

    rows = [row("a", 1.05, 100.0), row("b", 0.75, 80.0), row("c", 0.95, 100.0)]
    found = plan.summary(rows)
    assert found["beyond"] == ["b 0"]
    assert [round(aim["reached"], 9) for aim in found["aims"]] == [0.05, 2, 2]
    assert [aim["met"] for aim in found["aims"]] == [True, False, False]


# ---- PyTorch's own pipelines.


def test_a_process_for_each_partition_trains() -> None:
    about = {"size": "small", "model": "gpt-tiny", "batch": 4, "m": 2, "warm_up": 1, "steps": 2}
    seconds = pytorch_answer("Schedule1F1B", {**about, "balance": [6, 5], "devices": ["cpu", "cpu"]})["seconds"]
    assert len(seconds) == 2
    assert all(second > 0 for second in seconds)
