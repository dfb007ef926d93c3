"""Saving and resuming: tied weights in one file, and the example, killed anywhere and started with another balance."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import torchgpipe
from tests.conftest import Pipe

EXAMPLES = Path(torchgpipe.__file__).parent.parent / "examples"


def test_safetensors_write_the_memory_of_tied_weights_once(pipe: Pipe, tmp_path: Path) -> None:
    """Their functions that take a model do."""
    safetensors = pytest.importorskip("safetensors.torch")
    models, file = [], tmp_path / "model.safetensors"
    for _ in range(2):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh())
        layers[1].weight = layers[0].weight
        models.append(pipe(layers, [2, 1]))
    first, second = models
    nn.init.ones_(first.get_parameter("1.weight"))
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save_file(first.state_dict(), file)
    safetensors.save_model(first, file)
    safetensors.load_model(second, file)
    assert all(map(torch.equal, second.state_dict().values(), first.state_dict().values()))
    assert second.get_parameter("1.weight") is second.get_parameter("0.weight")


# -------------------------------------------------------------------------------------------------- the example, killed

STEPS = 4
SMALL = ["--steps", str(STEPS), "--every", "2", "--batch", "3", "--context", "8", "--chunks", "2"]


class Killed(BaseException):
    """An exception that the example does not catch."""


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("resume")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def uninterrupted(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses: list[float] = example.main([*SMALL, "--file", str(tmp_path_factory.mktemp("whole") / "state.pt")])
    assert len(set(losses)) == STEPS
    return losses


def test_a_run_that_is_killed_anywhere_has_the_losses_of_one_that_is_not(
    example: ModuleType, uninterrupted: list[float], tmp_path: Path
) -> None:
    """The run is killed in each step at each point of each save; the next run has another balance."""
    places = [(example.Run, "step"), (torch, "save"), (os, "fsync"), (os, "replace")]
    most = STEPS + 3 * STEPS // 2
    for moment in range(most + 1):
        file = ["--file", str(tmp_path / f"{moment}.pt")]
        left = moment

        def mortal(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                return original(*args)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in places:
                patch.setattr(owner, name, mortal(getattr(owner, name)))
            if moment < most:
                with pytest.raises(Killed):
                    example.main([*SMALL, *file])
            else:
                example.main([*SMALL, *file])
        assert left == 0
        assert example.main([*SMALL, *file, "--partitions", str(1 + moment % 4)]) == uninterrupted
