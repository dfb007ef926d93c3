"""Make a checkpoint valid as a whole or not at all.

Each checkpoint is a folder, and the name of the folder says whether the checkpoint is valid::

    step-00000100/           valid
    step-00000200.part/      being written, or left behind by processes that were killed
                  |
                  └── renamed to step-00000200 when all processes have written their files
    step-00000200.old/       replaced by a checkpoint of the same step: valid until that one has its name

A valid checkpoint is renamed before it is removed. So a process may be killed at any moment, and the last valid
checkpoint is complete.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

__all__ = ["Folder"]


class Folder:
    """The valid checkpoints of a training run, by their steps.

    Args:
        path: the folder of the training run
        keep: the number of valid checkpoints to keep
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep

    def valid(self) -> dict[int, Path]:
        """Return the paths of the valid checkpoints, in ascending order of their steps."""
        by_step = {}
        # In reverse order step-1 comes after step-1.old, and takes its place.
        for path in sorted(self.path.glob("step-*"), reverse=True):
            if match := re.fullmatch(r"step-(\d+)(\.old)?", path.name):
                by_step[int(match[1])] = path
        return dict(sorted(by_step.items()))

    def named(self, step: int) -> Path:
        """Return the path that the checkpoint of ``step`` has when it is valid."""
        return self.path / f"step-{step:08}"

    def part(self, step: int) -> Path:
        """Return the path where the checkpoint of ``step`` is written."""
        return self.named(step).with_suffix(".part")

    def begin(self, step: int) -> None:
        """Remove what was left behind, and make the folder in which a checkpoint is written."""
        self._clear()
        self.part(step).mkdir(parents=True)

    def publish(self, step: int) -> None:
        """Make a checkpoint valid, in place of one of the same step, and remove the oldest ones."""
        path = self.named(step)
        if path.exists():
            path.rename(path.with_suffix(".old"))
        self.part(step).rename(path)
        valid = self.valid()
        for old in [*valid][: -self._keep]:
            valid[old].rename(self.part(old))
        self._clear()

    def _clear(self) -> None:
        """Remove the folders that are not valid."""
        valid = self.valid().values()
        for path in [*self.path.glob("step-*.part"), *self.path.glob("step-*.old")]:
            if path not in valid:
                shutil.rmtree(path)
