"""Save and load a training run, independently of the number of its processes.

Each process writes one file with ``torch.save`` into the folder of the step. The file has the layers of this process,
under the plain model's names. To load, each process maps all files into memory and copies what its own layers need.
Nothing that is loaded can run code: ``torch.load(weights_only=True)`` accepts tensors and plain values only.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchgpipe.distributed.folder import Folder
from torchgpipe.distributed.training_state import (
    collect_optimizer,
    collect_random,
    restore_model,
    restore_optimizer,
    restore_random,
    verify_optimizer,
)
from torchgpipe.front.pipelined_module import runs_of
from torchgpipe.model.values import each

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

    A checkpoint fits a model over any number of processes, a :class:`~torchgpipe.GPipe`, and the plain model, whichever
    of them was saved. In several processes, all of them make
    a ``Checkpoints`` and call the same methods in the same order.

    Args:
        folder: where the checkpoints are; all processes must see the same files there
        model: the model to save, or to load into
        optimizer: the optimizer of the model, if there is one
        keep: the number of valid checkpoints to keep
        timeout: how long a process waits for another process that has not written its part

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
        if optimizer is not None:
            verify_optimizer(model, optimizer)
        self.folder = Path(folder)
        self._steps = Folder(self.folder, keep)
        self._model = model
        self._optimizer = optimizer
        self._group: dist.ProcessGroup | None = None
        self._rank, self._where, self._writes_model = 0, "", True
        runs = runs_of(model)
        processes = getattr(model, "_processes", None) if runs is None else runs.settings.processes
        if processes is not None:
            # A group of its own, on the CPU: a thread uses it while the model uses that of the model.
            self._group = dist.new_group(backend="gloo", timeout=timeout)
            self._rank = dist.get_rank(self._group)
            self._where = f"{processes.place}: "
            self._writes_model = processes.replica == 0  # The others have the same parameters.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None

    def steps(self) -> list[int]:
        """Return the steps of all valid checkpoints, in ascending order."""
        return list(self._steps.valid())

    def save(self, step: int, state: Any = None, *, asynchronous: bool = False) -> None:
        """Save the model, the optimizer, the random state of each process, and ``state``.

        With ``asynchronous``, everything is first copied into host memory.

        Args:
            step: the number of the checkpoint; by default, the checkpoint with the largest number is loaded
            state: other values that are needed to go on, such as a learning rate schedule's ``state_dict()``: tensors,
                numbers, strings and None in tuples, lists and dicts. The ``state`` of the first process is saved.
            asynchronous: whether to return after the copy, and to write in the background. The next call raises the
                error if writing fails.

        Raises:
            ValueError: ``step`` is not an integer, or is negative.
            RuntimeError: this process or another could not write its part. The checkpoint before is still valid.
        """
        _verify_step(step)
        self.wait()
        # Parameters and not views of them, so that copies of tied ones are one.
        state_of = partial(self._model.state_dict, keep_vars=True) if asynchronous else self._model.state_dict
        content = {
            "model": state_of() if self._writes_model else {},
            "optimizer": {},
            "random": {self._rank: collect_random(self._model)},
            "state": state,
        }
        if self._optimizer is not None and self._writes_model:
            content["optimizer"] = collect_optimizer(self._model, self._optimizer)
        if asynchronous:
            copies = {id(tensor): tensor.detach().to("cpu", copy=True) for _, tensor in each(content)}
            self._writing = self._writer.submit(self._write, step, copy.deepcopy(content, copies))
        else:
            self._write(step, content)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is valid.

        Raises:
            RuntimeError: as :meth:`save`
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, step: int | None = None) -> Any:
        """Load this process's part of a checkpoint.

        Args:
            step: which one (default: the last valid one)

        Returns:
            the ``state`` that :meth:`save` was given; None if there is no checkpoint, and nothing was loaded

        Raises:
            ValueError: ``step`` is not an integer, or is negative.
            FileNotFoundError: there is no valid checkpoint of this step.
            RuntimeError: the checkpoint lacks a tensor of the model or has it in another shape, or a file is damaged.
            pickle.UnpicklingError: the checkpoint has an object that is neither a tensor nor a plain value.
        """
        if step is not None:
            _verify_step(step)
        self.wait()
        valid = self._steps.valid()
        if step is None:
            last = torch.tensor(max(valid, default=-1))
            if self._group is not None:  # On a network file system, processes may see different folders.
                dist.broadcast(last, group=self._group, group_src=0)
            step = int(last)
            if step < 0:
                return None
        if step not in valid:
            raise FileNotFoundError(
                f"{self._steps.named(step)} is not there or not valid; valid are the steps {[*valid]}"
            )
        content = _read(valid[step])
        restore_model(self._model, content["model"])
        if self._optimizer is not None:
            restore_optimizer(self._model, self._optimizer, content["optimizer"])
        restore_random(self._model, content["random"].get(self._rank, {}))
        return copy.deepcopy(content["state"])

    def _write(self, step: int, content: dict[str, Any]) -> None:
        first = self._rank == 0
        try:
            self._together(lambda: self._steps.begin(step) if first else None)
            self._together(lambda: self._write_file(self._steps.part(step) / f"rank-{self._rank:05}.pt", content))
            self._together(lambda: self._steps.publish(step) if first else None)
        except Exception as error:
            raise RuntimeError(
                f"{self._where}could not save the checkpoint of step {step} in {self.folder}: {error}; no process has "
                "saved it, and the checkpoint before is still valid"
            ) from error

    def _write_file(self, path: Path, content: dict[str, Any]) -> None:
        with path.open("xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # Without it, a crash of the machine may leave a valid name and an empty file.

    def _together(self, action: Callable[[], None]) -> None:
        """Run ``action`` in all processes, wait for all of them, and raise in each if one has failed."""
        fault = None
        try:
            action()
        except Exception as error:
            fault = error
        failed = torch.tensor(int(fault is not None))
        if self._group is not None:
            dist.all_reduce(failed, group=self._group)
        if fault is not None:
            raise fault
        if failed:
            raise RuntimeError("another process has failed, and says why")


def _verify_step(step: Any) -> None:
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an integer, 0 or more, but got {step!r}")


def _read(path: Path) -> dict[str, Any]:
    """Join the files of all processes. The values of a tensor are read from its file when they are copied."""
    content: dict[str, Any] = {"model": {}, "optimizer": {}, "random": {}, "state": None}
    for file in sorted(path.glob("rank-*.pt"), reverse=True):
        try:
            part = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"{file} cannot be read: {error}; load(step=...) takes another one") from error
        for name in ("model", "optimizer", "random"):
            content[name].update(part[name])
        content["state"] = part["state"]  # The first process comes last, and its state stays.
    return content
