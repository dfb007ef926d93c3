"""What benchmarks measure and compute is what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import plan_choice, plan_models, plan_prediction, schedules
from benchmarks.cost import ideal_speed_up
from benchmarks.mechanisms import places
from benchmarks.memory_steps import MAKERS
from benchmarks.models import gpt, resnet, unet
from benchmarks.peers import Peer, Request
from benchmarks.placement import placed
from benchmarks.pytorch_pipelines import answer as pytorch_answer
from benchmarks.pytorch_pipelines import refusal
from benchmarks.records import spread, table_of
from benchmarks.schedules import NAMES, WAYS
from benchmarks.tasks import TASKS, closed_units, inputs
from benchmarks.training_speed import Proposal, experiments, summary, targets
from benchmarks.training_steps import balance, runner, train
from tests.benchmarks.test_benchmarks import Silent

pytestmark = pytest.mark.slow


def request(model: str, devices: list[str], balance: list[int] | None = None) -> Request:
    about = {"size": "small", "model": model, "batch": 4, "m": 2, "mode": "except_last"}
    return {**about, "devices": devices, "balance": balance, "warm_up": 0, "steps": 1}


def test_a_table_takes_keys_formats_spreads_and_functions() -> None:
    row = {"n": 2, "seconds": 0.12345, "ratio": spread([1.0, 2.0, 4.0]), "empty": None}
    columns: Any = {"n": "n", "s": "seconds:.2f", "over": "ratio:1", "none": "empty", "twice": lambda row: 2 * row["n"]}
    line = table_of([row], columns).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["2", "0.12", "2.0 (1.0-4.0)", "-", "4"]
    assert table_of([], columns) == ""


def test_the_ideal_is_the_clocks_in_which_a_device_works() -> None:
    assert ideal_speed_up(1, 8, "never") == 1
    assert ideal_speed_up(4, 1, "never") == 1  # one micro-batch: one device works after the other
    assert ideal_speed_up(4, 5, "never") == 4 * 5 / 8
    assert ideal_speed_up(1, 8, "always") == 3 / 4  # two forwards and a backward, which takes as long as two forwards
    assert ideal_speed_up(1, 8, "always", forward=1 / 2) == 2 / 3  # a backward as long as one forward
    assert ideal_speed_up(1, 1, "except_last") == 1
    assert ideal_speed_up(2, 10**6, "never") == pytest.approx(2)


def test_neighbours_share_a_device_where_there_are_too_few() -> None:
    assert placed(["cuda:0", "cuda:1"], 4) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert placed(["cpu"], 2) == ["cpu", "cpu"]
    assert places(["cpu"], 2) == ["cpu:0", "cpu:1"], "each partition has a device to copy to"


# ---- Memory.


def test_a_footprint_is_the_model_and_what_the_step_needs_beside_it() -> None:
    """It is counted in a process that does nothing else."""
    shape = {"kind": "footprint", "model": "gpt", "args": [64, 4, 2, 16, 16], "sample": [16], "batch": 32, "m": 8}
    asked = {**shape, "balance": [6, 5], "devices": ["cpu", "cpu"]}
    with Peer("ours", "memory_steps.py") as peer:
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


def test_balances_are_of_layers_and_of_what_no_skip_divides() -> None:
    asked = {"size": "small", "model": "unet", "rows": 1, "device": "cpu", "partitions": [2, 8], "seconds": 0.0}
    two, eight = balance("ours", asked)["balances"]
    model = TASKS["small"]["unet"].make()
    assert (len(two["balance"]), sum(two["balance"])) == (2, len(model))
    assert (len(two["units"]), sum(two["units"])) == (2, len(list(closed_units(model))))
    assert (len(eight["balance"]), eight["units"]) == (8, None)
    sizes = [len(list(closed_units(model))) for model in (gpt(8, 2, 2, 4, 4), resnet([2], 3, 2), unet(1, 1, 2))]
    assert sizes == [7, 4 + 2 * 2 + 3, 4]


@pytest.mark.parametrize("model", TASKS["small"])
def test_every_way_computes_the_same(model: str) -> None:
    torch.manual_seed(0)
    module = TASKS["small"][model].make().eval()
    x = inputs(TASKS["small"][model], 4, "cpu")
    asked = request(model, ["cpu", "cpu"], [len(module) - 3, 3])
    with torch.no_grad():
        outputs = [
            run(x) for peer in ("plain", "checkpoint_sequential", "ours") if (run := runner(peer, module, asked))
        ]
    assert len(outputs) == 3
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


def test_a_run_is_timed_and_summed_up() -> None:
    size = len(TASKS["small"]["gpt"].make())
    planned = list(experiments(["plain", "ours"], [2], ["except_last"]))
    answers = [
        *[{"plain": [train("plain", request("gpt", ["cpu"]))]}] * 2,
        {"ours": [train("ours", request("gpt", ["cpu:0", "cpu:1"], [size - 3, 3]))]},
    ]
    naive, _, piped = summary("gpt", 4, 2, Proposal({2: {"balance": [size - 3, 3]}}, 3), planned, answers)
    assert naive["plain"]["speed-up"]["median"] == 1
    seconds = [row[peer]["seconds"][0] for row, peer in ((naive, "plain"), (piped, "ours"))]
    assert piped["ours"]["throughput"]["median"] == pytest.approx(4 / seconds[1])
    assert piped["ours"]["speed-up"]["median"] == pytest.approx(seconds[0] / seconds[1])
    answer = answers[1]["plain"][0]
    share = answer["forward"][0] / answer["seconds"][0]
    assert piped["ideal"] == pytest.approx(ideal_speed_up(2, 2, "except_last", share))


def test_targets_are_held_against_the_limit_the_original_and_equal_memory() -> None:
    def row(experiment: str, mode: str, **peers: object) -> dict[str, object]:
        about = {"model": "resnet", "experiment": experiment, "mode": mode, "ideal": ideal_speed_up(1, 4, "always")}
        return {**about, **peers}

    def answer(seconds: float, peak: int, original: float) -> dict[str, object]:
        ratios = {"speed-up": spread([1 / seconds]), "over original": spread([original])}
        return {"throughput": {}, "seconds": [seconds], "peak": peak, **ratios}

    reached = targets(
        [
            row("checkpoint_sequential", "-", checkpoint_sequential=answer(1.5, 100, 1)),
            row("pipeline-1", "always", ours=answer(1.6, 80, 1.1)),
            row("pipeline-1", "never", ours=answer(1.0, 200, 0.9)),  # faster, but takes more memory
        ]
    )
    found = [(one["aim"], one["where"], round(one["reached"]["median"], 3), one["met"]) for one in reached]
    assert found == [
        ("limit", "pipeline-1, always", round(1 / 1.6 / 0.75, 3), False),
        ("limit", "pipeline-1, never", round(1 / 0.75, 3), True),
        ("checkpoint_sequential", "pipeline-1, always", round(1.5 / 1.6, 3), False),
        ("original", "pipeline-1, always", 1.1, True),
        ("original", "pipeline-1, never", 0.9, False),
    ]


# ---- Plans.


@pytest.mark.parametrize("family", plan_models.FAMILIES)
def test_a_seed_makes_the_same_model(family: str) -> None:
    first, second = (plan_models.plan_model(family, 3) for _ in range(2))
    assert str(first.model) == str(second.model)
    assert (first.name, first.batch) == (second.name, second.batch)
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    assert plan_models.mean_of_squares(first.model(first.sample)).isfinite()


def test_aims_name_the_models_that_are_far_off() -> None:
    def row(name: str, predicted: float, counted: float) -> dict[str, Any]:
        turn = {"layers": 3, "batch": 8, "predicted": predicted, "measured": 1.0}
        turn |= {"predicted_bytes": [100.0, 0.0], "measured_bytes": [counted, 0.0]}
        return plan_prediction.row({"family": name, "seed": 0}, {}, [turn])

    rows = [row("a", 1.05, 100.0), row("b", 0.75, 80.0), row("c", 0.95, 100.0)]
    found = plan_prediction.summary(rows)
    assert found["beyond"] == ["b 0"]
    assert [round(aim["reached"], 9) for aim in found["aims"]] == [0.05, 2, 2]
    assert [aim["met"] for aim in found["aims"]] == [True, False, False]
    rows[1]["limit"] = 0.6
    limited = plan_prediction.summary(rows)["aims"][2:]
    assert [(round(aim["reached"], 9), aim["met"]) for aim in limited] == [(2, True), (0.25, False)]


def test_the_noise_is_between_two_runs_of_the_planned_way() -> None:
    seconds = {"a": [1.1, 1.1], "b": [1.0, 1.0], "c": [2.0, 2.0], plan_choice.AGAIN: [1.0, 1.2]}
    answer = {"batch": 8, "planned": "a", "predicted": {"a": 1.0, "b": 1.0, "c": 1.0}, "seconds": seconds}
    row = plan_choice.row({"family": "mlp", "seed": 0}, answer)
    assert (row["best"], row["rank"], row["ways"]) == ("b", 2, 3)
    assert row["chosen/best"] == pytest.approx(1.1) and row["noise"] == pytest.approx(0)


# ---- PyTorch's own pipelines.


def of_pytorch(**changes: object) -> Request:
    about = {"size": "small", "model": "gpt-tiny", "batch": 4, "m": 2, "warm_up": 1, "steps": 2}
    return {**about, "units": [6, 5], "devices": ["cpu", "cpu"], **changes}


def test_a_process_for_each_partition_trains() -> None:
    seconds = pytorch_answer("Schedule1F1B", of_pytorch())["seconds"]
    assert len(seconds) == 2
    assert all(second > 0 for second in seconds)


@pytest.mark.parametrize(
    ("peer", "changes", "reason"),
    [
        ("ScheduleGPipe", {"units": None}, "skips"),
        ("Schedule1F1B", {"m": 1}, "fewer micro-batches than partitions"),
        ("ScheduleGPipe", {"m": 1}, None),
        ("ScheduleGPipe", {"devices": ["cuda:0", "cuda:0"]}, "fewer devices than partitions"),
        ("ScheduleGPipe", {"devices": ["cuda:0", "cuda:1"]}, None),
    ],
)
def test_pytorch_s_own_pipelines_report_what_they_cannot_train(
    peer: str, changes: dict[str, object], reason: str | None
) -> None:
    assert refusal(peer, of_pytorch(**changes)) == reason
