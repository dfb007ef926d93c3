"""The benchmarks of whole models run from their arguments to their pictures, at meaninglessly small sizes."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import ablation, capacity, footprint, peers, step_memory
from benchmarks.models import gpt
from benchmarks.peers import Answer, Request
from benchmarks.random_models import random_model
from benchmarks.training import TASKS, Task

pytestmark = pytest.mark.slow

MODELS = ("ablation", "capacity", "speed", "transparency")


class Here:
    """A peer in this process, which answers like one in another process."""

    def __init__(self, name: str, script: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._module: Any = importlib.import_module(f"benchmarks.{Path(script).stem}")

    def ask(self, request: Request) -> Answer:
        answer: Answer = json.loads(json.dumps(self._module.answer(self.name, json.loads(json.dumps(request)))))
        return answer

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class Silent:
    """An allocator that reports nothing."""

    def peak(self, step: Callable[[], object]) -> int:
        step()
        return 0


def run_parts(name: str, tiny: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Return the result of a benchmark with parts. It runs in this process, and does not ask the allocator."""
    monkeypatch.setattr(peers, "Peer", Here)
    monkeypatch.setattr(step_memory, "reports", Silent)
    path = tmp_path / f"{name}.json"
    monkeypatch.setattr(sys, "argv", [name, *tiny.split(), "--json", str(path), *arguments])
    importlib.import_module(f"benchmarks.{name}").main()
    result: dict[str, Any] = json.loads(path.read_text())
    return result


class Run(Protocol):
    def __call__(self, name: str, *arguments: str) -> dict[str, Any]:
        """Return the results that a benchmark writes when started with these arguments."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return a function that runs a benchmark in this process.

    Memory is not counted, because that needs a process of its own.
    """

    def counted(forward: Any, memories: list[torch.device]) -> list[int]:
        torch.autograd.backward(forward())
        return [10**6 for _ in memories]

    def start(name: str, *arguments: str) -> dict[str, Any]:
        module = importlib.import_module(f"benchmarks.{name}")
        for starts in (module, peers):
            if hasattr(starts, "Peer"):
                monkeypatch.setattr(starts, "Peer", Here)
        path = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [name, "--devices", "cpu", *arguments, "--json", str(path)])
        module.main()
        assert path.with_suffix(".svg").read_text().count("<svg") == 1
        result: dict[str, Any] = json.loads(path.read_text())
        assert {"torch", "cpu", "cores", "commit"} <= set(result["environment"])
        return result

    allocations = importlib.import_module("benchmarks.allocations")
    for module in (allocations, footprint):
        monkeypatch.setattr(module, "peaks", counted)
        monkeypatch.setattr(module, "reports", lambda: None)
    return start


def test_speed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    compared = ("plain", "checkpoint_sequential", "ours")
    shape = ("--models", "gpt", "--partitions", "1", "2", "--checkpoint", "never", "--turns", "1", "--steps", "1")
    result = run("speed", *shape, "--peers", *compared)
    assert [row["experiment"] for row in result["rows"]] == [
        "naive-1",
        "micro-batches",
        "checkpoint_sequential",
        "2 micro-batches",
        "k micro-batches",
        "pipeline-1",
        "pipeline-2",
    ]
    assert [row["ours"]["peak"] > 10**6 for row in result["rows"] if row["experiment"] == "pipeline-1"] == [True]
    assert {one["aim"] for one in result["targets"]} == {"limit", "split", "checkpoint_sequential"}
    assert "| pipeline-2 " in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(8))
def test_models_are_drawn_by_the_seed(seed: int) -> None:
    first, second = random_model(seed), random_model(seed)
    assert sum(first.balance) == len(first.layers)
    assert (first.about, first.balance, first.m, first.mode) == (second.about, second.balance, second.m, second.mode)
    for part, same in zip(first.x.chunk(first.m), second.x.chunk(second.m), strict=True):
        torch.manual_seed(0)
        output = first.layers(part)
        torch.manual_seed(0)
        assert torch.equal(output, second.layers(same))


def test_capacity(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = capacity.Ladder((1,), [(1, 4), (1, 16), (1, 32), (1, 64), (1, 128)], (3, 4, 4), 2, 2)
    monkeypatch.setitem(capacity.LADDERS["small"], "unet", ladder)
    monkeypatch.setitem(TASKS["small"], "resnet101", Task(lambda: gpt(64, 1, 1, 2, 2), (2,), 2, 2))
    shape = ("--models", "unet", "--partitions", "1", "2", "--chunks", "2", "--limit", "1.2")
    result = run("capacity", *shape, "--peers", "plain", "ours")
    sizes = {
        name: [(row["size"], row["fits"]) for row in result["largest"] if row["experiment"] == name]
        for name in ("naive-1", "pipeline-1", "pipeline-2")
    }
    # Each ladder climbs until a model does not fit, and starts at least at the model that fits in fewer partitions.
    assert all(not tried[-1][1] and all(fits for _, fits in tried[:-1]) for tried in sizes.values())
    assert sizes["pipeline-1"] == sizes["naive-1"]
    assert sizes["pipeline-2"][0] == sizes["pipeline-1"][-2]
    assert len(result["growth"]) == 3 * (1 + 2)
    assert "the CPU has one memory" in re.sub(r"\s+", " ", capsys.readouterr().out).replace("The", "the")


def test_transparency(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    result = run("transparency", "--batches", "512", "--epochs", "1", "--seeds", "2")
    assert [row["experiment"] for row in result["rows"]] == ["plain-512", "pipeline-512"]
    assert all(0 <= accuracy <= 1 for row in result["rows"] for accuracy in row["accuracies"])
    assert [row["batch"] for row in result["differences"]] == [512]
    assert "| pipeline-512 " in capsys.readouterr().out


def test_ablation(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ablation.TASKS, "small", ablation.Task(1, 2, 4, 4, 2, 2))
    result = run("ablation", "--turns", "1", "--steps", "1")
    names = ["none", "dependency", "dependency, streams", "dependency, streams, portals"]
    assert [row["experiment"] for row in result["rows"]] == ["plain, one device", *names]
    kinds = [{span.split()[0] for span in row["spans"]} for row in result["rows"]]
    assert kinds == [set(), *[{"forward", "recomputation", "backward", "copy", "wait"}] * 4]
    assert "streams have nothing to overlap there" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS)
def test_all_take_the_same_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main()
    told = capsys.readouterr().out
    assert all(option in told for option in ("--size {small,", "paper", "--devices", "--peers", "--json", "--draw"))
