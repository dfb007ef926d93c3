"""What processes save together replaces an earlier save at one moment."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchgpipe.front import saved

safetensors = pytest.importorskip("safetensors.torch")


def write_parts(folder: Path, value: float, *, name: str = "model") -> dict[str, Tensor]:
    """Write what each of two processes saves, and return the whole."""
    whole = {}
    for rank in range(2):
        tensors = {f"{rank}.{k}": torch.full((2,), value + rank) for k in range(2)}
        (folder / f"part-{rank}").mkdir(parents=True)
        safetensors.save_file(tensors, folder / f"part-{rank}" / f"{name}.safetensors", {"format": "pt"})
        (folder / f"part-{rank}" / "config.json").write_text("{}")
        whole |= tensors
    return whole


def read(folder: Path, name: str = "model") -> dict[str, Tensor]:
    """Read what from_pretrained would read."""
    single = folder / f"{name}.safetensors"
    if single.exists():
        return dict(safetensors.load_file(single))
    places = json.loads((folder / f"{name}.safetensors.index.json").read_text())["weight_map"]
    return {key: safetensors.load_file(folder / place)[key] for key, place in places.items()}


def are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Crash(Exception):
    pass


def crashing(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Let everything that changes files fail after some steps."""
    left = [steps]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return function(*args, **kwargs)

        return run

    for owner, name in (
        *[(Path, "replace"), (Path, "unlink"), (Path, "write_text"), (Path, "mkdir"), (os, "link")],
        *[(shutil, "rmtree"), (shutil, "copyfile"), (safetensors, "save_file")],
    ):
        patch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("before", ["one file", "an index", "a save that crashed", "adapters"])
def test_a_crash_at_any_step_leaves_the_weights_of_one_save(tmp_path: Path, before: str) -> None:
    """The old weights were removed before the new ones had their names, and files of both had the same names."""
    name = "adapter_model" if before == "adapters" else "model"
    for steps in range(100):
        folder = tmp_path / str(steps)
        old = write_parts(folder, 1.0, name=name)
        if before == "one file":
            shutil.rmtree(folder)
            folder.mkdir()
            safetensors.save_file(old, folder / "model.safetensors")
        else:
            saved._join(folder, 2)
        if before == "a save that crashed":
            write_parts(folder, 3.0)
            with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
                crashing(patch, 11)
                saved._join(folder, 2)
            old = read(folder)
            for rank in range(2):
                shutil.rmtree(folder / f"part-{rank}")
        new = write_parts(folder, 5.0, name=name)
        try:
            with pytest.MonkeyPatch.context() as patch:
                crashing(patch, steps)
                saved._join(folder, 2)
        except Crash:
            found = read(folder, name)
            assert are_equal(found, old) or are_equal(found, new), steps
        else:
            break
    assert steps > 5 and are_equal(read(folder, name), new)
    files = {path.name for path in folder.iterdir()} - {"config.json"}
    assert files == {
        *([f"{name}-0000{k}-of-00002.safetensors" for k in (1, 2)] if name == "model" else []),
        f"{name}.safetensors{'.index.json' if name == 'model' else ''}",
    }


def test_what_cannot_be_joined_is_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    write_parts(tmp_path, 1.0)
    (tmp_path / "part-1" / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="leave safe_serialization=False out"):
        saved._join(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-0", "part-1"]
