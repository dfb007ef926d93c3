"""Determine the skips between partitions: plain data, known before anything runs.

The decorator `skippable` stores on a class the names that its layers stash and pop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from torchgpipe.skip.namespace import SkipKey

__all__ = ["SkipLayout", "is_skippable", "skips_of"]


class SkipLayout:
    """The skips that go from one partition to a later one.

    Skips that are stashed and popped in the same partition stay inside it, and are left out.

    Args:
        partitions: all modules of each partition, of a model that has passed `verify_skippables`

    Raises:
        TypeError: a skip is popped in an earlier partition than it is stashed, or never stashed. The model was
            verified, so its layers were replaced or isolated since.

    Attributes:
        leaving: for each partition, the skips that it sends, each with its source and target partition
        arriving: for each partition, the skips that it receives, likewise
    """

    def __init__(self, partitions: Sequence[Sequence[nn.Module]]) -> None:
        partitions = [[module for module in modules if is_skippable(module)] for modules in partitions]
        sources = {key: j for j, modules in enumerate(partitions) for key in skips_of(modules, "stashable_names")}
        self.leaving: list[list[tuple[SkipKey, int, int]]] = [[] for _ in partitions]
        self.arriving: list[list[tuple[SkipKey, int, int]]] = [[] for _ in partitions]
        for target, modules in enumerate(partitions):
            for key in skips_of(modules, "poppable_names"):
                source = sources.get(key)
                if source is None or source > target:
                    raise TypeError(
                        f"'{key.name}' is popped in partition {target}, but "
                        + ("not stashed" if source is None else f"stashed in partition {source}")
                        + "; layers were replaced or isolated since the model was wrapped, and "
                        "verify_skippables(model) tells which no longer match"
                    )
                if source != target:
                    self.leaving[source].append((key, source, target))
                    self.arriving[target].append((key, source, target))


def is_skippable(module: nn.Module) -> bool:
    """Return ``isinstance(module, Skippable)``, in less time, for models with many modules."""
    return hasattr(type(module), "stashable_names")


def skips_of(modules: Iterable[nn.Module], names: str) -> Iterator[SkipKey]:
    """Yield the skips that modules stash or pop; ``names`` is ``'stashable_names'`` or ``'poppable_names'``."""
    for module in modules:
        if is_skippable(module):
            layer: Any = module
            yield from [layer.skip_key(name) for name in sorted(getattr(layer, names))]
