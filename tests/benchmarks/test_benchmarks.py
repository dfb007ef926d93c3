"""Every benchmark runs from its arguments to its tables, at meaninglessly small sizes."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import (
    batch_norm,
    checkpoints,
    gpu,
    host_time,
    memory,
    peers,
    plan,
    plan_models,
    program,
    published_bubbles,
    published_memory,
    published_speed,
    schedules,
    training_cores,
    windows,
)
from benchmarks.peers import Answer, Request
from torchgpipe.schedule import NAMES

pytestmark = pytest.mark.slow


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
    """An allocator that reports nothing. Memory is counted in a process that does nothing else."""

    def peak(self, step: Callable[[], object]) -> int:
        step()
        return 10**6


def run_parts(name: str, tiny: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Return the result of a benchmark. It runs in this process, and does not ask the allocator."""
    for module in [*sys.modules.values()]:
        if module.__name__.startswith("benchmarks."):
            for attribute, other in (("Peer", Here), ("reports", Silent)):
                if hasattr(module, attribute):
                    monkeypatch.setattr(module, attribute, other)
    path = tmp_path / f"{name}.json"
    monkeypatch.setattr(sys, "argv", [name, *tiny.split(), "--json", str(path), *arguments])
    importlib.import_module(f"benchmarks.{name}").main()
    result: dict[str, Any] = json.loads(path.read_text())
    return result


#: The program, its part, options, and a line that is told.
TINY = [
    ("host_time", "pipelined", "--shape 2 2 --turns 1 --steps 1 --layers 2 4", "glue operation, us"),
    ("memory", "first", "--first 2 --mib 1 --peers ours", "| always | resident | ours "),
    ("memory", "random", "--seeds 1 3", "at most 1.001"),
    ("memory", "copies", "--unet 2 2 16 4 --devices cpu:0 cpu:1 cpu:2", "tuples / portals"),
    ("published", "memory", "", "| unet (1, 2) | pipeline-2 |"),
    (
        "published",
        "bubbles",
        "",
        "0.2431, 0.2431 (8) | 0.1055, 0.0949 (14) | 0.1585, 0.1585 (8) | 0.1083, 0.1083 (16) |",
    ),
    ("published", "schedules", "", "8.1% (5), 8.1% (5) "),
    ("published", "speed", "", "| U-Net (5, 64) | 8 | 40 |     3.105 |"),
    ("fits", "architectures", "--names vit", "| vision "),
    ("schedules", "sleeping", "--partitions 2 --micro-batches 3 --sleep 0.0001 --turns 1", "| V-Half "),
    ("schedules", "pipelined_sleeping", "--partitions 2 --micro-batches 3 --sleep 0.0001 --turns 1", "| 1F1B "),
    ("schedules", "activations", "--micro-batches 5 --steps 1", "| ZeroBubble "),
    ("schedules", "pipelined_activations", "--micro-batches 5 --steps 1", "| forward and backward "),
    ("schedules", "recorded", "--sleep 0.0002", "| one device at a time "),
    (
        "trl",
        "trainers",
        "--turns 1 --steps 1 --rows 4 --tokens 2 --chunks 2 --token 0 --least 0",
        "| pipelined, 4 devices",
    ),
    ("windows", "order", "--partitions 2 --micro-batches 2 5 --windows 2", "| ZeroBubble "),
    ("windows", "host", "--turns 1", "| pipelined | workers "),
    ("training", "pipelined", "--shrink 64", "over naive placement"),
    ("training", "accuracy", "--batches 512 --epochs 1 --seeds 1 --devices cpu", "| pipeline-512 "),
    ("plan", "prediction", "--seeds 1", "| predicted / measured step, off 1 in the median "),
    ("checkpoints", "checkpoints", "--turns 1", "| tiny    | DCP  | "),
    ("batch_norm", "batch_norm", "--pairs 1 --turns 1 --peers ours", "ours in forward: at most"),
]
FEW = {
    "training": "--turns 1 --steps 1",
    "plan": "--shrink 100000 --measure 0 --turns 1 --steps 1",
}


@pytest.mark.parametrize(("name", "part", "options", "line"), TINY, ids=[f"{name}-{part}" for name, part, *_ in TINY])
def test_every_part_of_every_program_runs(
    name: str,
    part: str,
    options: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if (name, part) == ("training", "pipelined"):
        pytest.importorskip("transformers", reason="it trains GPT-2")
    if name == "fits":
        pytest.importorskip("transformers", reason="the catalogue has its models")
    if name == "trl":
        pytest.importorskip("trl", reason="the trainers are its own")
        warnings.filterwarnings("ignore", ".* is deprecated and will be removed in v6", FutureWarning)  # TRL 1.16 asks
    if part == "accuracy":
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    tiny_unet = published_memory.Experiment("pipeline-2", "unet", (1, 2), [25, 40], published_memory.Published("1M"))
    monkeypatch.setattr(published_memory, "EXPERIMENTS", [tiny_unet])
    monkeypatch.setattr(published_bubbles, "SETTINGS", published_bubbles.SETTINGS[:1])
    monkeypatch.setattr(published_speed, "FAMILIES", published_speed.FAMILIES[2:3])
    monkeypatch.setattr(memory, "MODES", ("always",))
    turns = windows.taken_in_turns
    monkeypatch.setattr(windows, "taken_in_turns", lambda runs, _, measure: turns(runs, 1, measure))
    monkeypatch.setattr(schedules, "ROWS", 2)
    monkeypatch.setattr(training_cores, "PLACES", {name: training_cores.PLACES[name] for name in NAMES[:2]})
    monkeypatch.setattr(checkpoints, "CASES", {"tiny": (2, 3)})
    monkeypatch.setattr(batch_norm, "SHAPE", (4, 2, 3, 3))
    tiny = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    monkeypatch.setitem(plan_models.FAMILIES, "mlp", lambda random: (tiny, torch.randn(4, 8)))
    monkeypatch.setattr(plan, "FAMILIES", ("mlp",))
    result = run_parts(name, f"{FEW.get(name, '')} {options} --only {part}", monkeypatch, tmp_path)
    assert line in capsys.readouterr().out
    assert {"torch", "cpu", "cores", "commit"} <= set(result["environment"])


@pytest.mark.parametrize("one", [one for one in gpu.SLICES if one.name != "tests"], ids=lambda one: one.name)
def test_every_slice_of_a_gpu_has_its_key_figures(
    one: gpu.Slice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in `make gpu DRY=1`, which starts a process for each slice and each peer; `test_gpu` has the processes."""
    for package in one.needs:
        pytest.importorskip(package)
    program_, *tiny = f"{one.program} {one.tiny}".split()
    peers_ = ["--peers", "plain", "ours"] if one.peers else []
    result = run_parts(program_, " ".join(tiny), monkeypatch, tmp_path, *peers_, "--seconds", "60")
    assert not gpu.figures(one, {"result": result}).startswith("no figures")


def test_ways_are_asked_in_turn_and_every_other_turn_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Noting(Here):
        def ask(self, request: Request) -> Answer:
            asked.append(self.name)
            return {}

    monkeypatch.setattr(peers, "Peer", Noting)
    case = {name: (name, {}) for name in ("ours", "plain")}
    (answers,) = program.ask_in_turn([case], "tiny_steps.py", 2, lambda: False, fresh=True, repeat=[2])
    assert asked == ["ours", "plain", "ours", "plain", "plain", "ours", "plain", "ours"]
    assert [len(own) for own in answers.values()] == [4, 4]
    program.ask_in_turn([case], "tiny_steps.py", 2, lambda: True)
    assert len(asked) == 10, "the first turn is always asked"


def test_costs_are_told_apart() -> None:
    """A call takes 3, an operation 2 and a micro-batch 50 beyond the plain model."""
    turn = [
        {"plain": 10.0 * layers, "step": 10.0 * layers + 50 + 3 * layers + (2 * layers if glued else 0)}
        for layers, glued in ((4, False), (32, False), (4, True), (32, True))
    ]
    found = host_time.beyond([[one] for one in turn], "step", 4, 32)
    assert {what: one["median"] for what, one in found.items()} == {"call": 3.0, "glue": 2.0, "micro-batch": 50.0}
