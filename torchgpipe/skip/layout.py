"""Which partition sends which skip to which: plain data, known before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchgpipe.skip.namespace import SkipKey

__all__ = ["SkipLayout"]


class SkipLayout:
    """The skips that go from one partition to a later one.

    Those that are stashed and popped in the same partition stay inside it and do not occur here.

    Args:
        stashed: the skips that are stashed in each partition
        popped: the skips that are popped in each partition

    Attributes:
        leaving: for each partition, the skips that it sends, with the partitions they go from and to
        arriving: for each partition, the skips that it receives, likewise
    """

    def __init__(self, stashed: Sequence[Iterable[SkipKey]], popped: Sequence[Iterable[SkipKey]]) -> None:
        sources = {key: j for j, keys in enumerate(stashed) for key in keys}
        self.leaving: list[list[tuple[SkipKey, int, int]]] = [[] for _ in stashed]
        self.arriving: list[list[tuple[SkipKey, int, int]]] = [[] for _ in stashed]
        for target, keys in enumerate(popped):
            for key in keys:
                source = sources[key]
                if source != target:
                    self.leaving[source].append((key, source, target))
                    self.arriving[target].append((key, source, target))
