"""The speed benchmark trains one model in every compared way, and computes the ideal speed-up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.ablation import places
from benchmarks.cost import MODES, ideal_speed_up
from benchmarks.models import gpt, resnet, unet
from benchmarks.peers import Request
from benchmarks.placement import placed
from benchmarks.records import spread
from benchmarks.speed import PEERS, Proposal, experiments, summary
from benchmarks.speed_targets import targets
from benchmarks.training import TASKS, balance, closed_units, inputs, runner, train


def request(model: str, devices: list[str], balance: list[int] | None) -> Request:
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


def test_neighbours_share_a_device_where_there_are_too_few() -> None:
    assert placed(["cuda:0", "cuda:1"], 4) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert placed(["cuda:0", "cuda:1"], 1) == ["cuda:0"]
    assert placed(["cpu"], 2) == ["cpu", "cpu"]


def test_the_ablation_numbers_the_cpu() -> None:
    """Each partition has its own worker, and a device to copy to."""
    assert places(["cpu"], 2) == ["cpu:0", "cpu:1"]
    assert places(["cuda:0", "cuda:1"], 4) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_all_is_measured_that_was_asked_for() -> None:
    planned = list(experiments(list(PEERS), [1, 2], list(MODES)))
    assert [name for name, *_ in planned] == [
        "naive-1",
        "micro-batches",
        "checkpoint_sequential",
        "2 micro-batches",
        "k micro-batches",
        *["pipeline-1"] * 3,
        *["pipeline-2"] * 3,
    ]
    assert list(experiments(["plain"], [1, 2], list(MODES))) == [
        ("naive-1", 1, "-", ["plain"]),
        ("micro-batches", 1, "-", ["plain"]),
    ]


def test_pytorch_s_own_pipelines_are_compared_without_recomputation() -> None:
    planned = experiments(list(PEERS), [1, 2], list(MODES))
    taking_part = [(n, mode) for _, n, mode, peers in planned if "Schedule1F1B" in peers]
    assert taking_part == [(2, "never")]


def test_balances_are_of_layers_and_of_what_no_skip_divides() -> None:
    asked = {"size": "small", "model": "unet", "rows": 1, "device": "cpu", "partitions": [2, 8], "seconds": 0.0}
    two, eight = balance("ours", asked)["balances"]
    model = TASKS["small"]["unet"].make()
    assert (len(two["balance"]), sum(two["balance"])) == (2, len(model))
    assert (len(two["units"]), sum(two["units"])) == (2, len(list(closed_units(model))))
    assert (len(eight["balance"]), eight["units"]) == (8, None)


def test_a_model_is_divided_only_where_no_skip_passes() -> None:
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
        *[{"plain": [train("plain", request("gpt", ["cpu"], None))]}] * 2,
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


def test_few_micro_batches_are_two_or_as_many_as_there_are_pieces() -> None:
    proposal = Proposal({}, 3)
    counts = [proposal.chunks(experiment, 8) for experiment in ("pipeline-1", "2 micro-batches", "k micro-batches")]
    assert counts == [8, 2, 3]


def test_a_peer_reports_what_it_cannot_train() -> None:
    one_unit = nn.Sequential(nn.Linear(2, 2))
    assert runner("checkpoint_sequential", one_unit, request("gpt", ["cpu"], None)) is None
    planned = [("checkpoint_sequential", 1, "-", ["checkpoint_sequential"])]
    (row,) = summary("gpt", 4, 2, Proposal({}, 1), planned, [{"checkpoint_sequential": [{"none": "skips"}]}])
    assert row["checkpoint_sequential"] == {"none": "skips"}


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
