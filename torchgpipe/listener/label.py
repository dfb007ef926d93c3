"""Labels in the trace of ``torch.profiler``: the work that a timeline shows, by name."""

from __future__ import annotations

from typing import Any

from torch.autograd import profiler

from torchgpipe.devices.torch_internals import profiler_runs
from torchgpipe.listener.listener import NO_MICRO_BATCH, End, Kind, Listener

__all__ = ["labelled"]


def labelled(listener: Listener | None) -> Listener | None:
    """Return a listener that labels the work as well, if the profiler runs, and the same listener otherwise."""
    # A label costs as much as a small layer, also where the profiler does not run.
    return _Labelled(listener) if profiler_runs() else listener


class _Labelled:
    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener

    def begin(self, kind: Kind, i: int, j: int, other: int | None, stream: Any) -> End:
        end = None if self._listener is None else self._listener.begin(kind, i, j, other, stream)
        label: Any = profiler.record_function(_text(kind, i, j, other))
        label.__enter__()

        def finish(failed: bool) -> None:
            label.__exit__(None, None, None)
            if end is not None:
                end(failed)

        return finish


def _text(kind: Kind, i: int, j: int, other: int | None) -> str:
    text = f"torchgpipe: {kind}, {'weights' if i == NO_MICRO_BATCH else f'micro-batch {i}'}, partition {j}"
    return text if other is None else f"{text} {'to' if kind == 'copy' else 'for'} {other}"
