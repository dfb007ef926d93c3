"""Saving and resuming: into the plain model and back, with another balance, and after a run was killed anywhere."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe
from tests.conftest import Pipe
from tests.plain import run_plain
from tests.practice.test_recipes import batches

CHUNKS = 2
EXAMPLES = Path(torchgpipe.__file__).parent.parent / "examples"


def make_layers() -> nn.Sequential:
    """Return layers with running statistics and with one random layer, whose draws have one order for every balance."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 3)
    )


class Training:
    """A run of `make_layers` through a pipeline with this balance, or plain if the balance is None."""

    def __init__(self, pipe: Pipe, balance: list[int] | None) -> None:
        layers = make_layers()
        self.model: nn.Module = layers
        self.run: Callable[[Tensor], Tensor] = partial(run_plain, layers, chunks=CHUNKS)
        if balance is not None:
            self.model = self.run = pipe(layers, balance, chunks=CHUNKS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.01, total_steps=6)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def state_dict(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in vars(self).items() if hasattr(part, "state_dict")}
        return {**parts, "random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "schedule", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["random"])

    def train(self, steps: slice) -> list[float]:
        losses = []
        for [(x, y)] in batches(6)[steps]:
            loss = F.cross_entropy(self.run(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize(
    ("before", "after"), [(None, [2, 1, 3]), ([6], [1] * 6), ([2, 1, 3], None), ([1] * 6, [2, 1, 3])], ids=str
)
def test_training_goes_on_under_another_balance(pipe: Pipe, before: list[int] | None, after: list[int] | None) -> None:
    whole = Training(pipe, None)
    expected = whole.train(slice(6))

    first = Training(pipe, before)
    losses = first.train(slice(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    torch.manual_seed(7)
    second = Training(pipe, after)
    second.load_state_dict(torch.load(file, weights_only=True))
    losses += second.train(slice(3, 6))

    assert losses == expected
    state, expected_state = second.model.state_dict(), whole.model.state_dict()
    assert list(state) == list(expected_state)
    assert all(map(torch.equal, state.values(), expected_state.values()))


def test_safetensors_write_the_memory_of_tied_weights_once(pipe: Pipe, tmp_path: Path) -> None:
    """Their functions that take a model do."""
    safetensors = pytest.importorskip("safetensors.torch")
    models, file = [], tmp_path / "model.safetensors"
    for _ in range(2):
        layers = make_layers()
        layers[4].weight = layers[2].weight
        models.append(pipe(layers, [5, 1]))
    first, second = models
    nn.init.ones_(first.get_parameter("4.weight"))
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save_file(first.state_dict(), file)
    safetensors.save_model(first, file)
    safetensors.load_model(second, file)
    assert all(map(torch.equal, second.state_dict().values(), first.state_dict().values()))
    assert second.get_parameter("4.weight") is second.get_parameter("2.weight")


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
