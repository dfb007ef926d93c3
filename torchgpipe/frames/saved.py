"""Saving a model of transformers over several processes: each writes its own tensors, and a plain script loads them.

Every process lets the model's class save what this process has, into a folder of its own within the folder::

    folder/part-0/model.safetensors, config.json        folder/model-00001-of-00002.safetensors
    folder/part-1/model.safetensors, config.json   ->   folder/model-00002-of-00002.safetensors
                                                        folder/model.safetensors.index.json, config.json

Then the first process renames the files, and writes the index. Adapters, which have no index, it joins in one file.
"""

from __future__ import annotations

import json
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
                place.parent.mkdir(parents=True, exist_ok=True)
                file.replace(place)
    for base, files in weights.items():
        for old in base.parent.glob(
            "*.safetensors*"
        ):  # What an earlier save has left, which from_pretrained might take.
            if _base(old) == base.name:
                old.unlink()
        base.parent.mkdir(parents=True, exist_ok=True)
        if base.name.startswith("adapter_model"):
            _join_adapters(base.with_name(f"{base.name}.safetensors"), files)
        else:
            _index(base, files)
    for rank in range(size):
        shutil.rmtree(_part(folder, rank), ignore_errors=True)


def _base(file: Path) -> str:
    """Return the name of a file of weights without its number and what follows."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.[\w.-]*json)?$", "", file.name)


def _index(base: Path, files: list[Path]) -> None:
    """Rename files of weights, and write the index that tells which of them has which tensor."""
    places, total = {}, 0
    for k, file in enumerate(files):
        place = base.with_name(f"{base.name}-{k + 1:05}-of-{len(files):05}.safetensors")
        with file.open("rb") as opened:  # A file begins with the length of its header, which is JSON.
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        places.update(dict.fromkeys(header, place.name))
        total += max([entry["data_offsets"][1] for entry in header.values()], default=0)
        file.replace(place)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    base.with_name(f"{base.name}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _join_adapters(place: Path, files: list[Path]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = [pair for file in files for pair in load_file(file).items()]
    save_file({name: value for name, value in tensors if value.numel()}, place, {"format": "pt"})
