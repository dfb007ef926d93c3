"""Saving a model of transformers over several processes: each writes its own tensors, and a plain script loads them.

Every process lets the model's class save what this process has, into a folder of its own within the folder::

    folder/part-0/model.safetensors, config.json        folder/model-00001-of-00002.safetensors
    folder/part-1/model.safetensors, config.json   ->   folder/model-00002-of-00002.safetensors
                                                        folder/model.safetensors.index.json, config.json

Then the first process links the files to their names, and replaces the index, which is the one file that says which
weights count: at any moment it names files that are there. What an earlier save has left is removed after that.
Adapters, which have no index, are joined in one file, which replaces the earlier one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchgpipe.processes.processes import Processes

__all__ = ["save_together"]


def save_together(
    processes: Processes,
    save: Callable[..., Any],
    folder: str | Path,
    state: Mapping[str, Any],
    *args: Any,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Save a model in all processes, for which only those of the first replica write.

    Args:
        processes: the processes
        save: the method ``save_pretrained`` of the plain model, which takes ``state_dict=``
        folder: all processes must see the same files there
        state: the tensors of this process
        *args: for ``save``
        push_to_hub: must be False
        **kwargs: for ``save``

    Raises:
        ValueError: the folder is to be uploaded.
        RuntimeError: another process has failed.
    """
    if push_to_hub:
        raise ValueError("over several processes, save_pretrained writes the folder only; upload that afterwards")
    if processes.replica:
        return
    folder, rank = Path(folder), processes.rank
    names = processes.gather([*state], "the names that save_pretrained saves in all processes")
    before = {name for each in names[:rank] for name in each}
    # peft looks for whole modules that it saves beside adapters, and fails without their names.
    absent = {name: torch.empty(0) for each in names for name in each if "modules_to_save" in name}

    with processes.all_together("the end of what save_pretrained writes"):
        part = _part(folder, rank)
        shutil.rmtree(part, ignore_errors=True)
        tensors = {name: value for name, value in state.items() if name not in before}
        if tensors or rank == 0:
            save(str(part), *args, **{**kwargs, "is_main_process": True, "state_dict": absent | tensors})
    with processes.all_together("the files of the whole model, which the first process joins"):
        if rank == 0:
            _join(folder, processes.size)


def _part(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}"


def _join(folder: Path, size: int) -> None:
    """Move the files of all parts into the folder."""
    weights: dict[Path, list[Path]] = {}
    others: dict[Path, Path] = {}
    for part in [_part(folder, rank) for rank in range(size)]:
        for file in sorted(part.rglob("*.*")):
            place = folder / file.relative_to(part)
            if file.suffix in (".bin", ".pt"):
                raise ValueError(
                    f"{file} has no names that can be read by themselves; leave safe_serialization=False out"
                )
            if file.suffix == ".safetensors":
                weights.setdefault(place.with_name(_base(file)), []).append(file)
            elif part.name == "part-0" and file.is_file() and not file.name.endswith(".index.json"):
                others[file] = place
    for file, place in others.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        file.replace(place)
    for base, files in weights.items():
        base.parent.mkdir(parents=True, exist_ok=True)
        if base.name.startswith("adapter_model"):
            _join_adapters(base.with_name(f"{base.name}.safetensors"), files)
        else:
            _index(base, files)
    for rank in range(size):
        shutil.rmtree(_part(folder, rank), ignore_errors=True)


def _base(file: Path) -> str:
    """Return the name of a file of weights without its number and what follows."""
    return re.sub(r"(-new)?(-\d{5}-of-\d{5})?\.safetensors(\.index\.[\w.-]*json)?$", "", file.name)


def _index(base: Path, files: list[Path]) -> None:
    """Give files of weights their names, and replace the index that tells which of them has which tensor.

    While the index names files of an earlier save under the same names, the new ones get others first.
    """
    index = base.with_name(f"{base.name}.safetensors.index.json")
    numbers = [f"-{k + 1:05}-of-{len(files):05}.safetensors" for k in range(len(files))]
    names = [f"{base.name}{number}" for number in numbers]
    used = {*json.loads(index.read_text())["weight_map"].values()} if index.exists() else set()
    if used & {*names}:
        files = _put(index, files, [f"{base.name}-new{number}" for number in numbers])
    _put(index, files, names)


def _put(index: Path, files: list[Path], names: list[str]) -> list[Path]:
    """Link files to names, let the index name them, remove what it has named before, and return the new paths."""
    places, total = [index.with_name(name) for name in names], 0
    tensors: dict[str, str] = {}
    for file, place in zip(files, places):
        place.unlink(missing_ok=True)
        try:
            os.link(file, place)
        except OSError:  # A file system without links.
            shutil.copyfile(file, place)
        with file.open("rb") as opened:  # A file begins with the length of its header, which is JSON.
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        tensors.update(dict.fromkeys(header, place.name))
        total += max([entry["data_offsets"][1] for entry in header.values()], default=0)
    new = files[0].with_name("index")
    new.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": tensors}, indent=2, sort_keys=True))
    new.replace(index)
    for old in index.parent.glob("*.safetensors*"):
        if _base(old) == _base(index) and old not in (index, *places):
            old.unlink()
    return places


def _join_adapters(place: Path, files: list[Path]) -> None:
    from safetensors.torch import load_file, save_file

    tensors, new = [pair for file in files for pair in load_file(file).items()], files[0].with_name("joined")
    save_file({name: value for name, value in tensors if value.numel()}, new, {"format": "pt"})
    new.replace(place)
