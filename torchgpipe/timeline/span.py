"""What a timeline is made of: plain data, which holds no tensor, no stream and no event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import torch

from torchgpipe.engine.record import Kind

__all__ = ["COMPUTING", "KINDS", "Row", "Span", "covered"]

#: What a device does when it computes.
COMPUTING: tuple[Kind, ...] = ("forward", "recomputation", "backward")

#: All kinds of spans.
KINDS: tuple[Kind, ...] = (*COMPUTING, "copy", "wait")


@dataclass(frozen=True, slots=True)
class Row:
    """A partition, as it is shown.

    Attributes:
        partition: its index
        device: where it computes
        layers: the names of its layers
    """

    partition: int
    device: torch.device
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran from ``start`` to ``end``.

    Attributes:
        step: the call of the model that it belongs to, counted from 0 since recording began
        kind: ``'forward'``, ``'recomputation'``, ``'backward'``, ``'copy'`` or ``'wait'``
        micro_batch: the index of the micro-batch
        partition: the index of the partition that computes, sends or waits
        device: the device of that partition
        stream: the stream of that device: ``'computing'``, ``'leaving'``, ``'arriving'``, or one of the latter two for
            skips, as ``'skip leaving'``
        layers: the names of the partition's layers
        start: seconds since recording began
        end: seconds since recording began
        other: the partition that a copy goes to, or that a wait is for; None for what a cell computes
        failed: whether it has raised an error, or was given up because of one
    """

    step: int
    kind: Kind
    micro_batch: int
    partition: int
    device: torch.device
    stream: str
    layers: tuple[str, ...]
    start: float
    end: float
    other: int | None = None
    failed: bool = False

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def computes(self) -> bool:
        """Whether it is a cell, and no copy or wait."""
        return self.kind in COMPUTING


def covered(spans: Iterable[Span]) -> float:
    """The seconds that spans cover; where several overlap they count once."""
    seconds, last = 0.0, -inf
    for start, end in sorted((span.start, span.end) for span in spans):
        seconds += max(0.0, end - max(start, last))
        last = max(last, end)
    return seconds
