"""Labels in the trace of ``torch.profiler``, while that runs: the same work that a timeline shows, by name."""

from __future__ import annotations

from typing import Any

from torch.autograd import profiler

from torchgpipe.engine.record import End, Kind, Step

__all__ = ["labelled"]


def labelled(step: Step | None, pipeline: object) -> Step | None:
    """A step of ``pipeline`` that gives labels as well, if the profiler runs; else the step itself."""
    # Asked first, because a label that nobody reads costs as much as a small layer.
    return _Labelled(step, id(pipeline)) if profiler._is_profiler_enabled else step


class _Labelled:
    def __init__(self, step: Step | None, source: object) -> None:
        self._step = step
        self.source = source

    def begin(self, kind: Kind, i: int, j: int, other: int | None, stream: Any) -> End:
        end = None if self._step is None else self._step.begin(kind, i, j, other, stream)
        label: Any = profiler.record_function(_text(kind, i, j, other))
        label.__enter__()

        def finish(failed: bool) -> None:
            label.__exit__(None, None, None)
            if end is not None:
                end(failed)

        return finish


def _text(kind: Kind, i: int, j: int, other: int | None) -> str:
    text = f"torchgpipe: {kind}, micro-batch {i}, partition {j}"
    return text if other is None else f"{text} {'to' if kind == 'copy' else 'for'} {other}"
