"""The benchmark of pipelined modules runs from its arguments to its tables, at meaninglessly small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import peers, pipelined_host, pipelined_models, pipelined_steps, step_memory
from tests.benchmarks.test_benchmarks import Silent, run_parts

pytestmark = pytest.mark.slow

SIZES = "--models gpt --blocks 2 --width 8 --context 4 --rows 2 --chunks 2 --partitions 2 --sleeping 5 --sleep 0.0001"
TINY = f"{SIZES} --layers 2 4 --micro-batches 2 --no-export --turns 1 --steps 1"


def test_parts_are_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run_parts("pipelined", TINY, monkeypatch, tmp_path, "--only", "memory", "speed")
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    result = run_parts("pipelined", TINY, monkeypatch, tmp_path, "--only", "sleeping", "host")
    assert [*result["parts"]] == ["host", "sleeping", "memory", "speed"]
    (row,) = result["parts"]["speed"]["rows"]
    assert set(row["over naive"]) == {"micro-batches", "call", "1F1B", "GPipe", "halves"}
    assert {row["threads"] for row in result["parts"]["host"]["costs"]} == {"inline", "workers"}
    told = capsys.readouterr().out
    assert "| 1F1B over naive placement, two cores, lowest model " in told
    assert "| host time of a micro-batch beyond the plain model, us, workers, " in told


@pytest.mark.parametrize("way", pipelined_steps.WAYS)
def test_saved_activations_are_those_of_the_simulation(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "reports", Silent)
    monkeypatch.setattr(pipelined_steps, "ROWS", 2)
    answer = pipelined_steps.answer("ours", {"n": 3, "m": 5, "way": way, "steps": 2})
    assert answer["same_each_step"]
    assert answer["saved"] == answer["simulated"]


def test_costs_are_told_apart() -> None:
    """A call takes 3, an operation 2 and a micro-batch 50 beyond the plain model."""
    turn = [
        {"plain": 10.0 * layers, "step": 10.0 * layers + 50 + 3 * layers + (2 * layers if glued else 0)}
        for layers, glued in ((4, False), (32, False), (4, True), (32, True))
    ]
    found = pipelined_host.parts([[one] for one in turn], "step", 4, 32)
    assert {what: one["median"] for what, one in found.items()} == {"call": 3.0, "glue": 2.0, "micro-batch": 50.0}


def test_naive_placement_moves_what_a_module_is_called_with() -> None:
    model = pipelined_models.Glued(2)
    pipelined_models.place_naively(model, {"blocks.1": torch.device("meta")})
    block = model.blocks[1]
    assert block(torch.zeros(1, 4)).device.type == "meta"
    moved = pipelined_models.moved({"a": (torch.zeros(1), [torch.zeros(1), 3])}, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1] == 3


def test_a_split_by_export_gives_the_same_loss() -> None:
    """In a process of its own, because export leaves much behind."""
    shape = {"model": "gpt", "layers": 2, "width": 8, "context": 4, "rows": 2, "m": 2}
    with peers.running(["ours"], "pipelined_speed.py") as children:
        found = children["ours"].ask({"kind": "split", **shape})
    assert found["pipelined"]["difference"] <= 1e-6
    assert "fails" in found["export"] or found["export"]["difference"] <= 1e-6
