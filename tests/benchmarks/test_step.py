"""The benchmark of steps runs from its arguments to its tables, at meaninglessly small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("matplotlib")

from benchmarks import pytorch_pipelines, step_host, step_memory, step_sleeping, step_speed, step_training
from benchmarks.peers import Answer, Request
from benchmarks.step_sleeping import Sleeping
from tests.benchmarks.test_benchmarks import Silent, run_parts
from torchgpipe import GPipe
from torchgpipe.schedule import NAMES, Action

pytestmark = pytest.mark.slow

SIZES = "--models gpt --chunks 2 --shrink 16 --partitions 2 --micro-batches 3 --sleep 0.0001 --tiny 2 2"
TINY = f"{SIZES} --turns 1 --steps 1"


def micro_batches(_: str, request: Request) -> Answer:
    return step_training.answer("plain", {**request, "kind": "micro-batches"})


def test_parts_are_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_sleeping, "NAMES", NAMES[:2])
    monkeypatch.setattr(step_speed, "PLACES", {name: step_speed.PLACES[name] for name in NAMES[:2]})
    monkeypatch.setattr(pytorch_pipelines, "answer", micro_batches)  # Its processes take ten seconds to start.
    monkeypatch.setattr(step_host, "MODES", ["always"])
    run_parts("step", TINY, monkeypatch, tmp_path, "--only", "memory", "host")
    threads = torch.get_num_threads()
    result = run_parts("step", TINY, monkeypatch, tmp_path, "--only", "speed", "sleeping", "machine")
    assert torch.get_num_threads() == threads
    assert [*result["parts"]] == ["machine", "speed", "sleeping", "memory", "host"]
    assert (tmp_path / "step.svg").read_text().count("<svg") == 1
    (row,) = result["parts"]["speed"]["rows"]
    assert {*row["speed-up"]} == {
        *("whole, 1 thread", "whole, 2 threads", "GPipe", "1F1B", "ScheduleGPipe", "Schedule1F1B")
    }
    told = capsys.readouterr().out
    assert "| simulated / measured, 2 devices, lowest " in told
    assert "| what two threads allow " in told


def test_ways_that_do_not_train_the_same_give_no_result() -> None:
    with pytest.raises(RuntimeError, match="different losses"):
        step_speed.verify_losses("mlp", {"1F1B": [{"loss": 1.0}], "GPipe": [{"loss": 1.1}]})


@pytest.mark.parametrize("schedule", NAMES)
def test_saved_activations_are_those_of_the_simulation(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "reports", Silent)
    monkeypatch.setattr(step_memory, "ROWS", 2)
    request = {"n": 4, "m": 6, "schedule": schedule, "mode": "never", "device": "cpu", "steps": 2}
    answer = step_memory.answer("ours", request)
    assert answer["same_each_step"]
    assert all(saved <= simulated for saved, simulated in zip(answer["saved"], answer["simulated"], strict=True))
    assert max(answer["saved"]) == max(answer["simulated"])


def test_the_backward_of_a_sleeping_layer_is_split() -> None:
    """The path to the input, of two rows, sleeps in I; the path to the weight, of one row, sleeps in W."""
    slept: list[int] = []

    class Noted(Sleeping):
        def _sleep(self, grad: Tensor) -> None:
            slept.append(len(grad))

    model = GPipe(
        nn.Sequential(Noted(0.0)),
        [1],
        devices=["cpu"],
        chunks=2,
        checkpoint="never",
        schedule=[[Action(kind, i, 0) for kind in ("F", "I", "W") for i in range(2)]],
        loss_fn=lambda output, _: output.mean(),
    )
    model.step(torch.zeros(4, 1, requires_grad=True))
    assert slept == [2, 2, 1, 1]
