"""What was recorded, for whoever wants to see it: the spans, and the ways to look at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchgpipe.timeline import schedule_text, trace
from torchgpipe.timeline.report import Report
from torchgpipe.timeline.span import Row, Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Timeline"]


class Timeline:
    """What a pipeline has done, and when; made by :func:`torchgpipe.record`.

    ``print(timeline)`` draws the last step as text, and in a notebook the object shows its picture.
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
        """All that was recorded, in the order of steps, and in each in the order of time.

        Raises:
            RuntimeError: the block that records is not left yet.
        """
        return self._recorded()

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that are kept; the first step since recording began is 0."""
        self._recorded()
        return list(self._micro_batches)

    @property
    def partitions(self) -> list[Row]:
        """Each partition's device and layers."""
        self._recorded()
        return self._rows

    def _recorded(self) -> list[Span]:
        """The spans, when the recording is over."""
        if self._spans is None:
            raise RuntimeError("the timeline is still being recorded; read it after the block of torchgpipe.record()")
        return self._spans

    def of_step(self, step: int | None = None) -> list[Span]:
        """The spans of one step.

        Args:
            step: its number, by default that of the last

        Raises:
            ValueError: that step was not recorded, or is not kept.
        """
        steps = self.steps
        if not steps:
            raise ValueError("nothing was recorded: the model was not called in the block of torchgpipe.record()")
        number = steps[-1] if step is None else step
        if number not in steps:
            raise ValueError(f"step {number} is not among those that were kept, which are {steps}")
        return [span for span in self.spans if span.step == number]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes all spans as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

        A process is a device, and a thread in it is one of its streams. Arrows go from copies to what waits for them.

        Args:
            path: the file to write, such as ``'step.json'``
        """
        trace.write(self.spans, Path(path))

    def plot(self, path: str | PathLike[str] | None = None, *, step: int | None = None) -> Figure:
        """Draws one step: a row for each partition with its device, and a box for each cell with its micro-batch.

        Copies are thin boxes below the cells of the partition that sends, and a failed cell is framed in red.

        Args:
            path: where to save the picture; the name's ending gives the format, as ``'step.svg'`` or ``'step.png'``
            step: the number of the step, by default the last

        Returns:
            the figure

        Raises:
            ImportError: Matplotlib is not installed.
            ValueError: that step was not recorded, or is not kept.
        """
        # Drawing needs more than this package does, and not everybody draws.
        from torchgpipe.timeline import drawing

        figure = drawing.draw(self.of_step(step), self._rows)
        if path is not None:
            drawing.save(figure, path)
        return figure

    def report(self) -> Report:
        """What the spans say about the use of the devices, over all steps that are kept, and what to try.

        Raises:
            ValueError: no cell was recorded.
        """
        return Report(self.spans, self._rows, self._micro_batches, self._peak_memory)

    def __str__(self) -> str:
        if not self._spans:
            return repr(self)
        return schedule_text.schedule(self.of_step(), self._rows)

    def __repr__(self) -> str:
        if self._spans is None:
            return "<Timeline, being recorded>"
        return f"<Timeline of {_counted(self.steps, 'step')}, {_counted(self._spans, 'span')}>"

    def _repr_svg_(self) -> str | None:
        """The picture for a notebook; none where it cannot be drawn."""
        if not self._spans:
            return None
        from torchgpipe.timeline import drawing

        picture = StringIO()
        try:
            drawing.save(self.plot(), picture)
        except ImportError:
            return None
        return picture.getvalue()


def _counted(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
