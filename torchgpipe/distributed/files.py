"""Checkpoints of a training run, which outlive its processes and do not depend on how many there were.

Everything in a file has the plain model's name, so the model may be cut in another way when it is loaded, or not at
all. Each process writes its own layers, with ``torch.distributed.checkpoint``::

    folder/step-00000100/           valid
    folder/step-00000200.part/      being written, or left behind by processes that were killed
                          |
                          └── renamed to step-00000200 when all processes have written all of it
    folder/step-00000200.old/       of the same step, from before: valid until the new one has its name

What is to be removed loses its name first. So whatever is killed, and when, the last valid checkpoint stays as it is.
Nothing that is loaded can run code: there are tensors only, and what else there is to save is in them as
``torch.load(weights_only=True)`` accepts it.
"""

from __future__ import annotations

import io
import pickle
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchgpipe.distributed.gpipe import DistributedGPipe

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of a training run, in one folder. ::

        checkpoints = Checkpoints("runs/first", model, optimizer)
        state = checkpoints.load() or {"step": 0}
        for step in range(state["step"], steps):
            ...
            if (step + 1) % 100 == 0:
                checkpoints.save(step + 1, {"step": step + 1}, asynchronous=True)
        checkpoints.wait()

    What one kind of model has saved, another can load: a :class:`~torchgpipe.distributed.DistributedGPipe` over any
    number of processes, a :class:`~torchgpipe.GPipe`, or the plain model. In several processes, all of them make it and
    call the same methods in the same order.

    Args:
        folder: where the checkpoints are; all processes must see the same files there
        model: what is saved, or loaded into
        optimizer: its optimizer, if there is one
        keep: how many valid checkpoints to keep
        timeout: how long a process waits for another that has not written its part

    Raises:
        ValueError: ``keep`` is not a positive integer, or the optimizer has a parameter that the model has not.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keep: int = 2,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(
                f"keep must be a positive integer, but got {keep!r}: the last checkpoint is needed to go on"
            )
        self.folder = Path(folder)
        self._model = model
        self._optimizer = optimizer
        self._keep = keep
        # On the CPU and apart from that of the model: it is used while the model computes.
        together = isinstance(model, DistributedGPipe)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if together else None
        self._rank = dist.get_rank(self._group) if together else 0
        self._where = f"{model.place}: " if isinstance(model, DistributedGPipe) else ""
        if optimizer is not None:
            self._names(optimizer)  # Refuses it now, and not only when there is something to save.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None

    def steps(self) -> list[int]:
        """The steps of all valid checkpoints, in ascending order."""
        return sorted(self._valid())

    def save(self, step: int, state: Any = None, *, asynchronous: bool = False) -> None:
        """Saves the model, the optimizer, the random state of each process, and ``state``.

        Args:
            step: tells the checkpoints apart; that of the largest one is loaded
            state: what else is needed to go on, such as a learning rate schedule's ``state_dict()``: tensors, numbers,
                strings and None in tuples, lists and dicts. That of the first process is saved.
            asynchronous: whether to return as soon as everything has been copied, and to write it meanwhile. What goes
                wrong then is raised by the next call.

        Raises:
            ValueError: ``step`` is not an integer, or is negative.
            RuntimeError: it could not be written, by this process or another. The last one is still valid.
        """
        _verify_step(step)
        self.wait()
        tensors = self._collect(state)
        if asynchronous:
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            self._writing = self._writer.submit(self._write, step, copies)
        else:
            self._write(step, tensors)

    def wait(self) -> None:
        """Waits until what is being written is valid.

        Raises:
            RuntimeError: as :meth:`save`
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, step: int | None = None) -> Any:
        """Loads a checkpoint: this process's part of it.

        Args:
            step: which one (default: the last valid one)

        Returns:
            what was given to :meth:`save` as ``state``; None if there is no checkpoint, and nothing was loaded

        Raises:
            ValueError: ``step`` is not an integer, or is negative.
            FileNotFoundError: there is no valid checkpoint of this step.
            RuntimeError: it does not have all that the model has, or in other shapes, or its files are damaged.
            pickle.UnpicklingError: it holds what has no place in a checkpoint.
        """
        if step is not None:
            _verify_step(step)
        self.wait()
        steps = self.steps()
        if self._group is not None:  # One process decides.
            last = torch.tensor(steps[-1] if steps else -1)
            dist.broadcast(last, group=self._group, group_src=0)
            steps = [*steps, int(last)] if last >= 0 else []
        if step is None and not steps:
            return None
        step = steps[-1] if step is None else step
        valid = self._valid()
        if step not in valid:
            raise FileNotFoundError(
                f"{self._path(step)} is not there or not valid; valid are those of the steps {sorted(valid)}"
            )
        file = _File(valid[step])
        self._load_model(file)
        if self._optimizer is not None:
            self._load_optimizer(file, self._optimizer)
        self._load_random(file)
        return file.value("state")

    # ---- The folder.

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def _valid(self) -> dict[int, Path]:
        """The valid checkpoints, by their steps."""
        valid = {}
        for path in sorted(self.folder.glob("step-*"), reverse=True):  # An old one comes before that in its place.
            if match := re.fullmatch(r"step-(\d+)(\.old)?", path.name):
                valid[int(match[1])] = path
        return valid

    def _replace(self, path: Path, part: Path) -> None:
        """Makes a part valid, in place of what was there, and keeps only the last ones."""
        if path.exists():
            path.rename(path.with_suffix(".old"))
        part.rename(path)
        valid = self._valid()
        for step in sorted(valid)[: -self._keep]:
            valid[step].rename(self._path(step).with_suffix(".part"))
        self._clear()

    def _clear(self) -> None:
        """Removes what is not valid: left behind, or not needed any more."""
        valid = self._valid().values()
        for path in [*self.folder.glob("step-*.part"), *self.folder.glob("step-*.old")]:
            if path not in valid:
                shutil.rmtree(path)

    # ---- Saving.

    def _collect(self, state: Any) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, value in self._model.state_dict().items():
            # What a module's get_extra_state returns need not be a tensor.
            tensors[f"model.{name}"] = value if isinstance(value, Tensor) else _packed(value)
        if self._optimizer is not None:
            tensors.update(self._collect_optimizer(self._optimizer))
        tensors[f"random.{self._rank}.cpu"] = torch.get_rng_state()
        for kind, device in self._accelerator():
            tensors[f"random.{self._rank}.{kind}"] = torch.get_device_module(device).get_rng_state(device)
        if self._rank == 0:
            tensors["state"] = _packed(state)
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def _collect_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        names = self._names(optimizer)
        tensors = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[parameter]
                others = {}
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer.{name}.{key}"] = value
                    else:
                        others[key] = value
                tensors[f"settings.{name}"] = _packed((_settings(group), others))
        return tensors

    def _write(self, step: int, tensors: dict[str, Tensor]) -> None:
        path = self._path(step)
        part = path.with_suffix(".part")
        try:
            if self._rank == 0:
                self._clear()
                part.mkdir(parents=True)
            self._meet()
            # Replicas have the same names: the first one's are written.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            with _unwarned() if self._group is None else nullcontext():
                save(
                    tensors,
                    storage_writer=FileSystemWriter(part),
                    planner=planner,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            if self._rank == 0:
                self._replace(path, part)
            self._meet()
        except (Exception, CheckpointException) as error:  # The latter is a BaseException.
            raise RuntimeError(
                f"{self._where}could not save the checkpoint of step {step} in {self.folder}, together with all other "
                f"processes: {error}; the last valid one is still there"
            ) from error

    def _meet(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    # ---- Loading.

    def _load_model(self, file: _File) -> None:
        own = self._model.state_dict()
        state: dict[str, Any] = file.tensors([f"model.{name}" for name in own])
        for name, value in own.items():
            if not isinstance(value, Tensor):
                state[f"model.{name}"] = _unpacked(state[f"model.{name}"])
        self._model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})

    def _load_optimizer(self, file: _File, optimizer: torch.optim.Optimizer) -> None:
        names = self._names(optimizer)
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for group in optimizer.param_groups:
            indices = range(len(state), len(state) + len(group["params"]))
            common: dict[str, Any] | None = None
            for index, parameter in zip(indices, group["params"]):
                name = names[parameter]
                settings, others = file.value(f"settings.{name}")
                common = settings if common is None else common
                if settings != common:
                    raise RuntimeError(
                        f"a group of the optimizer has parameters that were saved with different settings: '{name}' "
                        f"with {settings}, others with {common}; make the groups as they were"
                    )
                start = f"optimizer.{name}."
                # A name may be the start of another one.
                keys = [key for key in file.sizes if key.startswith(start) and "." not in key[len(start) :]]
                found = {key[len(start) :]: value for key, value in file.tensors(keys).items()}
                state[index] = {**found, **others}
            groups.append({**(common or _settings(group)), "params": list(indices)})
        optimizer.load_state_dict({"state": {k: v for k, v in state.items() if v}, "param_groups": groups})

    def _load_random(self, file: _File) -> None:
        """Goes on with the random numbers of the process of the same rank, if there was one."""
        start = f"random.{self._rank}."
        states = file.tensors([key for key in file.sizes if key.startswith(start)])
        if f"{start}cpu" in states:
            torch.set_rng_state(states[f"{start}cpu"])
        for kind, device in self._accelerator():
            if start + kind in states:
                torch.get_device_module(device).set_rng_state(states[start + kind], device)

    def _names(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
        """The names of the model's parameters, which those of the optimizer are among."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise ValueError(
                        f"{self._where}the optimizer has a parameter of shape {tuple(parameter.shape)} that the model "
                        "has not; make it of model.parameters()"
                    )
        return names

    def _accelerator(self) -> Iterable[tuple[str, torch.device]]:
        devices = {parameter.device for parameter in self._model.parameters() if parameter.device.type != "cpu"}
        return sorted([(str(device).replace(":", ""), device) for device in devices], key=str)


def _verify_step(step: Any) -> None:
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an integer, 0 or more, but got {step!r}")


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


@contextmanager
def _unwarned() -> Iterator[None]:
    """Lets a process read or write by itself without the warning that it does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _packed(value: Any) -> Tensor:
    """A value as a tensor of bytes."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)


class _File:
    """A valid checkpoint, to be read.

    Attributes:
        sizes: the shape and the kind of each of its tensors
    """

    def __init__(self, path: Path) -> None:
        self._reader = _Reader(path)
        self._path = path
        every = self._reader.read_metadata().state_dict_metadata
        self.sizes = {name: size for name, size in every.items() if isinstance(size, TensorStorageMetadata)}

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some of its tensors, by their names.

        Raises:
            RuntimeError: there are no such, or they cannot be read.
        """
        names = list(names)
        missing = [name for name in names if name not in self.sizes]
        if missing:
            raise RuntimeError(f"{self._path} has no {', '.join(missing)}; load it into the model that it was saved of")
        state = {name: torch.empty(self.sizes[name].size, dtype=self.sizes[name].properties.dtype) for name in names}
        if state:
            try:
                with _unwarned():
                    load(state, storage_reader=self._reader, no_dist=True)
            except CheckpointException as error:
                raise RuntimeError(f"{self._path} cannot be read: {error}; load(step=...) takes another one") from error
        return state

    def value(self, name: str) -> Any:
        return _unpacked(self.tensors([name])[name])


class _Reader(FileSystemReader):
    """Reads what a checkpoint consists of without running code that may be in there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{self.path} does not say what it consists of, but {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Knows what describes tensors, and nothing else."""

    _known: ClassVar = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", *[name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]},
        "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if name not in self._known.get(module, ()):
            raise pickle.UnpicklingError(f"a checkpoint has no use for {module}.{name}; don't trust this one")
        return super().find_class(module, name)


def _memory_format(kind: Any, name: str) -> Any:
    """In place of ``getattr``, with which Python 3.11.0 to 3.11.3 writes members of an Enum."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"a checkpoint has no use for an attribute of {kind}; don't trust this one")
    return _MEM_FORMAT_ENCODING[name]
