"""Hold the recorded spans, and offer the ways to look at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path

import torch

from torchgpipe.timeline import drawing, trace
from torchgpipe.timeline.report import Report
from torchgpipe.timeline.span import Row, Span

__all__ = ["Timeline"]


class Timeline:
    """The recorded work of a pipeline; returned by :func:`torchgpipe.record`.

    In a notebook the object shows a picture of the last step.
    """

    def __init__(self) -> None:
        self._spans: list[Span] | None = None
        self._rows: list[Row] = []
        self._micro_batches: dict[int, int] = {}
        self._peak_memory: dict[torch.device, int | None] = {}

    def _fill(
        self,
        rows: Iterable[Row],
        micro_batches: Mapping[int, int],
        spans: Iterable[Span],
        peak_memory: Mapping[torch.device, int | None],
    ) -> None:
        self._rows = list(rows)
        self._micro_batches = dict(micro_batches)
        self._spans = list(spans)
        self._peak_memory = dict(peak_memory)

    @property
    def spans(self) -> list[Span]:
        """All recorded spans, ordered by step, and in each step by time.

        Raises:
            RuntimeError: the recording block has not ended.
        """
        return self._recorded()

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that were kept; the first step since recording began is 0."""
        self._recorded()
        return list(self._micro_batches)

    @property
    def partitions(self) -> list[Row]:
        """The device and the layers of each partition."""
        self._recorded()
        return self._rows

    def _recorded(self) -> list[Span]:
        """Return the spans, or raise an error while the recording goes on."""
        if self._spans is None:
            raise RuntimeError("the timeline is still being recorded; read it after the block of torchgpipe.record()")
        return self._spans

    def of_step(self, step: int | None = None) -> list[Span]:
        """Return the spans of one step.

        Args:
            step: the number of the step, by default the last

        Raises:
            ValueError: the step was not recorded, or was not kept.
        """
        steps = self.steps
        if not steps:
            raise ValueError("nothing was recorded: the model was not called in the block of torchgpipe.record()")
        number = steps[-1] if step is None else step
        if number not in steps:
            raise ValueError(f"step {number} is not among those that were kept, which are {steps}")
        return [span for span in self.spans if span.step == number]

    def save(self, path: str | PathLike[str]) -> None:
        """Write all spans as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

        A process stands for a device, and its threads for the device's streams.

        Args:
            path: the file to write, such as ``'step.json'``
        """
        trace.write(self.spans, Path(path))

    def plot(self, path: str | PathLike[str] | None = None, *, step: int | None = None) -> str:
        """Draw one step: a row for each partition with its device, and a box for each cell with its micro-batch.

        Copies are thin boxes below the cells of the sending partition. Uploads and downloads have rows of their own
        below those of the partitions. A failed cell is red. A cell that is too short
        for the number of its micro-batch has none; a browser shows it under the mouse.

        Args:
            path: the file to save the picture to, as ``'step.svg'``
            step: the number of the step, by default the last

        Returns:
            The picture, as SVG.

        Raises:
            ValueError: the path does not end in ``.svg``, or the step was not recorded, or was not kept.
        """
        if path is not None and Path(path).suffix != ".svg":
            raise ValueError(f"a timeline is drawn as SVG, so path must end in .svg, but got {str(path)!r}")
        picture = drawing.draw(self.of_step(step), self._rows)
        if path is not None:
            Path(path).write_text(picture, encoding="utf-8")
        return picture

    def report(self) -> Report:
        """Report how busy the devices were in all kept steps, and which partition was the slowest.

        Raises:
            ValueError: no cell was recorded.
        """
        return Report(self.spans, self._rows, self._micro_batches, self._peak_memory)

    def __repr__(self) -> str:
        if self._spans is None:
            return "<Timeline, being recorded>"
        return f"<Timeline of {_counted(self.steps, 'step')}, {_counted(self._spans, 'span')}>"

    def _repr_html_(self) -> str:
        if not self._spans:
            return escape(repr(self))
        return drawing.draw(self.of_step(), self._rows, width=720)


def _counted(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
