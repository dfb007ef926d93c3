"""What the engine tells about its work, to whoever listens: that something begins on a stream, and that it ends.

The engine knows no more of a timeline than this. Where nobody listens there is no recorder, and nothing is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch

__all__ = ["End", "Kind", "Open", "Place", "Recorder", "Step", "WhatIsRecorded", "recorded"]

#: What a cell does. A copy goes to a later partition, or is of a gradient and comes back from there; a wait is what
#: the computation waits for such a copy.
Kind = Literal["forward", "recomputation", "backward", "copy", "wait"]


class WhatIsRecorded(NamedTuple):
    """A piece of work.

    Attributes:
        kind: what is done
        i: the micro-batch
        j: the partition that does it, or sends it
        other: the partition that a copy goes to, or that a wait is for; None for what stays on its device
    """

    kind: Kind
    i: int
    j: int
    other: int | None = None


class Place(NamedTuple):
    """What is to be known of a partition.

    Attributes:
        stream: where it computes
        layers: the names of its layers
    """

    stream: Any
    layers: Sequence[str]


#: To be called when something has been launched; the argument says whether it has failed.
End = Callable[[bool], None]


class Step(Protocol):
    """Listens to one mini-batch, its backward included."""

    def begin(self, what: WhatIsRecorded, stream: Any) -> End:
        """Is told that ``stream`` is about to do something.

        Returns:
            is called once, in whatever thread, when that is launched; never, if a backward pass is given up within
            a cell that is not checkpointed, because none of our code is on the stack there
        """


class Recorder(Protocol):
    """Listens to a model."""

    def begin_step(self, m: int, places: Sequence[Place]) -> Step:
        """Is told that a mini-batch of ``m`` micro-batches comes."""


def recorded(step: Step | None, what: WhatIsRecorded, stream: Any) -> AbstractContextManager[None]:
    """Tells of what is done in a ``with`` block, if somebody listens."""
    return nullcontext() if step is None else _recorded(step, what, stream)


@contextmanager
def _recorded(step: Step, what: WhatIsRecorded, stream: Any) -> Iterator[None]:
    end = _begin(step, what, stream)
    try:
        yield
    except BaseException:
        end(True)
        raise
    end(False)


def _begin(step: Step, what: WhatIsRecorded, stream: Any) -> End:
    if _last.open is not None:
        _last.open.followed()
    return step.begin(what, stream)


class Open:
    """A piece of work whose end may go unnoticed. What follows it in the same thread ends it, at the latest.

    Args:
        noticed: whether its end will be noticed, so that what follows does not mean anything: nodes of two cells can
            take turns in one thread
    """

    __slots__ = ("_end", "_task")

    def __init__(self, step: Step, what: WhatIsRecorded, stream: Any, noticed: bool) -> None:
        self._end: End | None = _begin(step, what, stream)
        self._task = _backward_pass()
        if not noticed:
            _last.open = self

    def end(self) -> None:
        """The first call counts."""
        end, self._end = self._end, None
        if _last.open is self:
            _last.open = None
        if end is not None:
            end(False)

    def followed(self) -> None:
        """Something begins in this thread: in the same backward pass, or else that one was given up."""
        _last.open = None
        if _backward_pass() == self._task:
            self.end()
        self._end = None


class _Last(threading.local):
    open: Open | None = None


_last = _Last()
_backward_pass: Callable[[], int] = torch._C._current_graph_task_id
