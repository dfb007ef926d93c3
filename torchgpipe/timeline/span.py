"""The plain data of a timeline, which holds no tensor, no stream and no event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import torch

from torchgpipe.listener.listener import Kind

__all__ = ["KINDS", "TRANSFERS", "Row", "Span", "covered", "milliseconds", "percent"]

#: The kinds of spans in which a device computes.
_COMPUTING: tuple[Kind, ...] = (
    "forward",
    "recomputation",
    "backward",
    "backward of the input",
    "backward of the weights",
)

#: The kinds of spans between a device and the memory of the host.
TRANSFERS: tuple[Kind, ...] = ("upload", "download")

#: All kinds of spans.
KINDS: tuple[Kind, ...] = (*_COMPUTING, "copy", "wait", *TRANSFERS)


@dataclass(frozen=True, slots=True)
class Row:
    """A partition of the recorded pipeline, drawn as a row.

    Attributes:
        partition: the index of the partition
        device: the device that the partition computes on
        layers: the names of the partition's layers
    """

    partition: int
    device: torch.device
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A cell, a copy, or a wait for a copy, from ``start`` to ``end``.

    Attributes:
        step: the call of the model, counted from 0 since recording began
        kind: ``'forward'``, ``'recomputation'``, ``'backward'``, ``'copy'`` or ``'wait'``; in a step also
            ``'backward of the input'`` and ``'backward of the weights'``, where a schedule splits backward; under
            ``offload``, ``'upload'`` and ``'download'``
        micro_batch: the index of the micro-batch; -1 for weights and their gradients
        partition: the index of the partition that computes, sends or waits
        device: the device of that partition
        stream: the stream of that device: ``'computing'``; ``'leaving'`` for a copy to a later partition, or
            ``'gradient leaving'`` for one back; for skips, ``'skip leaving'`` and ``'skip gradient leaving'``; under
            ``offload``, ``'weights arriving'``, ``'gradients leaving'``, ``'activations leaving'`` and ``'activations
            arriving'``
        layers: the names of the partition's layers
        start: seconds since recording began
        end: seconds since recording began
        other: the partition that a copy goes to, or whose copy a wait is for; None for a cell
        failed: whether the work raised an error, or was abandoned because of one
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
        """The duration of the span."""
        return self.end - self.start

    @property
    def computes(self) -> bool:
        """Whether the span is a cell, not a copy or a wait."""
        return self.kind in _COMPUTING


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds that spans cover. Time in which several overlap counts once."""
    seconds, last = 0.0, -inf
    for start, end in sorted((span.start, span.end) for span in spans):
        seconds += max(0.0, end - max(start, last))
        last = max(last, end)
    return seconds


def milliseconds(seconds: float) -> str:
    """Return a time for people."""
    return f"{seconds * 1000:.2f} ms"


def percent(share: float) -> str:
    """Return a share for people."""
    return f"{share * 100:.1f} %"
