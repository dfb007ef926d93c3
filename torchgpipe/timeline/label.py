"""Labels in the trace of ``torch.profiler``, while that runs: the same work that a timeline shows, by name."""

from __future__ import annotations

from typing import Any

from torch.autograd import profiler

from torchgpipe.timeline.record import End, Step, WhatIsRecorded

__all__ = ["labelled"]


def labelled(step: Step | None) -> Step | None:
    """A step that gives labels as well, if the profiler runs; else the step itself."""
    # Asked first, because a label that nobody reads costs as much as a small layer.
    return _Labelled(step) if profiler._is_profiler_enabled else step


class _Labelled:
    def __init__(self, step: Step | None) -> None:
        self._step = step

    def begin(self, what: WhatIsRecorded, stream: Any) -> End:
        end = None if self._step is None else self._step.begin(what, stream)
        label: Any = profiler.record_function(_text(what))
        label.__enter__()

        def finish(failed: bool) -> None:
            label.__exit__(None, None, None)
            if end is not None:
                end(failed)

        return finish


def _text(what: WhatIsRecorded) -> str:
    text = f"torchgpipe: {what.kind}, micro-batch {what.i}, partition {what.j}"
    if what.other is None:
        return text
    return f"{text} {'to' if what.kind == 'copy' else 'for'} {what.other}"
