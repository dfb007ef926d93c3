"""Tell a layer whether it is in the first or the second run of a checkpointed cell.

A checkpointed cell runs its layers twice: first without a graph (checkpointing), then again at backward
(recomputation). Layers with side effects that `state` does not undo must tell the runs apart. The phase belongs to a
thread, because several devices can be in different phases at once.
"""

from __future__ import annotations

import threading

__all__ = ["Phase", "current_phase", "enter_phase", "first_run", "is_checkpointing", "is_recomputing", "second_run"]

#: (is checkpointing, is recomputing)
Phase = tuple[bool, bool]


class _CurrentPhase(threading.local):
    # A context variable would break the graph of a compiled layer: `torch.compile` cannot trace `ContextVar.get`. A
    # default in the class would not be guarded: a layer compiled in a thread that has only the default would keep it.
    def __init__(self) -> None:
        self.phase: Phase = (False, False)


_current = _CurrentPhase()


def is_checkpointing() -> bool:
    """Return whether this thread is in the first run of a checkpointed cell, which leaves no graph.

    Example::

        class Counter(nn.Module):
            def forward(self, input):
                if is_checkpointing():
                    ...  # there will be a second run
                return input
    """
    return _current.phase[0]


def is_recomputing() -> bool:
    """Return whether this thread is in the second run of a checkpointed cell, at backward.

    Use it in layers with side effects outside of their buffers and plain attributes::

        class Notes(nn.Module):
            def forward(self, input):
                if not is_recomputing():
                    self.means.append(input.mean())  # once for each micro-batch
                return input
    """
    return _current.phase[1]


def current_phase() -> Phase:
    """Return the phase of this thread, which a thread that works for it can enter."""
    return _current.phase


def first_run() -> enter_phase:
    """Return what makes a ``with`` block the first run of a checkpointed cell.

    A pipeline inside a layer of another pipeline can be in both phases at once: its first run may be part of the outer
    pipeline's recomputation. So a phase is added to the thread's phase and does not replace it.
    """
    return enter_phase((True, _current.phase[1]))


def second_run() -> enter_phase:
    """Return what makes a ``with`` block the second run of a checkpointed cell; see `first_run`."""
    return enter_phase((_current.phase[0], True))


class enter_phase:
    """Make ``phase`` the phase of this thread for a ``with`` block."""

    __slots__ = ("_phase", "_previous")

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        self._previous = _current.phase
        _current.phase = self._phase

    def __exit__(self, *_: object) -> None:
        _current.phase = self._previous
