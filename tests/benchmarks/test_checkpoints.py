"""Checkpoints beside torch.distributed.checkpoint (DCP), and why they do not use it: a test for each reason."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torchgpipe.distributed import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def model_of(value: float) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(200, 200) for _ in range(3)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values(model: nn.Module) -> set[float]:
    return {parameter.mean().item() for parameter in model.parameters()}


def save_both(folder: Path) -> tuple[Callable[[nn.Module], object], Callable[[nn.Module], object], list[Path]]:
    """Save a model by both, and return what loads it into another one, and the files of tensors."""
    Checkpoints(folder / "ours", model_of(1)).save(1)
    dcp.save(model_of(1).state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    return (
        lambda model: Checkpoints(folder / "ours", model).load(),
        lambda model: dcp.load(model.state_dict(), checkpoint_id=folder / "dcp", no_dist=True),
        [folder / "ours" / "step-00000001" / "rank-00000.pt", folder / "dcp" / "__0_0.distcp"],
    )


def test_only_the_other_runs_code_that_is_in_a_file(tmp_path: Path) -> None:
    ours, others, (file, _) = save_both(tmp_path)
    for load, path in ((ours, file), (others, tmp_path / "dcp" / ".metadata")):
        path.write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
        with pytest.raises((RuntimeError, dcp.api.CheckpointException)):
            load(model_of(2))
        assert (tmp_path / "harm").exists() == (load is others)

    state = {"plain": Harmful(tmp_path / "more harm")}
    dcp.save(state, checkpoint_id=tmp_path / "state", no_dist=True)
    dcp.load({"plain": None}, checkpoint_id=tmp_path / "state", no_dist=True)
    assert (tmp_path / "more harm").exists()


def test_only_the_other_has_loaded_a_part_when_a_file_is_found_damaged(tmp_path: Path) -> None:
    ours, others, files = save_both(tmp_path)
    for load, path in zip((ours, others), files):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        model = model_of(2)
        with pytest.raises((RuntimeError, dcp.api.CheckpointException)):
            load(model)
        assert values(model) == ({2.0} if load is ours else {1.0, 2.0})


class Interrupted(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn.startswith("1"):
            raise OSError("interrupted")
        return super().resolve_data(write_item)


def test_the_other_writes_over_a_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    _, load, _ = save_both(tmp_path)
    with pytest.raises(dcp.api.CheckpointException), pytest.warns(UserWarning, match="overwriting"):
        dcp.save(model_of(3).state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True, planner=Interrupted())
    with pytest.raises(dcp.api.CheckpointException):
        load(model_of(2))
