"""The folder of a training run, in which a checkpoint is valid as a whole or not at all.

Each checkpoint is a folder of its own, and its name says what it is worth::

    step-00000100/           valid
    step-00000200.part/      being written, or left behind by processes that were killed
                  |
                  └── renamed to step-00000200 when all processes have written all of it
    step-00000200.old/       of the same step, from before: valid until the new one has its name

A checkpoint that is to be removed loses its name first. So a process may be killed at any moment, and the last valid
checkpoint stays as it is.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

__all__ = ["Folder"]


class Folder:
    """The valid checkpoints of a training run, by their steps.

    Args:
        path: where they are
        keep: how many of them to keep
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep

    def valid(self) -> dict[int, Path]:
        """Return where the valid checkpoints are, in ascending order of their steps."""
        found = {}
        for path in sorted(self.path.glob("step-*"), reverse=True):  # step-1.old before step-1, which replaces it.
            if match := re.fullmatch(r"step-(\d+)(\.old)?", path.name):
                found[int(match[1])] = path
        return dict(sorted(found.items()))

    def named(self, step: int) -> Path:
        """Return the path of the valid checkpoint of ``step``, which need not be there."""
        return self.path / f"step-{step:08}"

    def part(self, step: int) -> Path:
        """Return the path where the checkpoint of ``step`` is written."""
        return self.named(step).with_suffix(".part")

    def begin(self, step: int) -> None:
        """Make room for the parts of a checkpoint, and remove what was left behind."""
        self._clear()
        self.part(step).mkdir(parents=True)

    def publish(self, step: int) -> None:
        """Make a checkpoint valid, in place of the one of the same step, and remove those that are too many."""
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
