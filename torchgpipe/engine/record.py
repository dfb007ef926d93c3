"""What the engine tells about its work, to whoever listens: that something begins on a stream, and that it ends.

The engine knows no more of a timeline than this. Where nobody listens there is no recorder, and nothing is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

from torchgpipe.devices.backward_pass import at_end_of_pass, current_pass

__all__ = ["End", "Kind", "Open", "Place", "Recorder", "Step", "begin", "recorded"]

#: What a cell does. A copy goes to a later partition, or is of a gradient and comes back from there; a wait is what
#: the computation waits for such a copy.
Kind = Literal["forward", "recomputation", "backward", "copy", "wait"]


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
    """Listens to one mini-batch, its backward included.

    Attributes:
        source: the same for all steps of a pipeline
    """

    source: object

    def begin(self, kind: Kind, i: int, j: int, other: int | None, stream: Any) -> End:
        """Is told that ``stream`` is about to do something.

        Args:
            kind: what is done
            i: the micro-batch
            j: the partition that does it, or sends it
            other: the partition that a copy goes to, or that a wait is for; None for what stays on its device
            stream: where it is launched

        Returns:
            is called once, in whatever thread, when that is launched; never, if a backward pass is given up within a
            cell that is not checkpointed, because none of our code is on the stack there
        """


class Recorder(Protocol):
    """Listens to a model."""

    def begin_step(self, m: int, places: Sequence[Place]) -> Step:
        """Is told that a mini-batch of ``m`` micro-batches comes."""


def recorded(
    step: Step | None, kind: Kind, i: int, j: int, other: int | None, stream: Any
) -> AbstractContextManager[None]:
    """Tells of what is done in a ``with`` block, if somebody listens. It begins here; see `Step.begin`."""
    return _unheard if step is None else _Recorded(begin(step, kind, i, j, other, stream))


_unheard = nullcontext()


class _Recorded:
    # A generator would cost as much again as all that it tells.

    __slots__ = ("_end",)

    def __init__(self, end: End) -> None:
        self._end = end

    def __enter__(self) -> None:
        pass

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        self._end(raised is not None)


def begin(step: Step, kind: Kind, i: int, j: int, other: int | None, stream: Any) -> End:
    """Tells that something begins, and with it that something else has ended, if that was open; see `Step.begin`."""
    before = _thread.open.pop(step.source, None)
    if before is not None:
        before.followed()
    return step.begin(kind, i, j, other, stream)


class Open:
    """A backward of a cell, by the engine on its own, so that nobody of ours may be there when it ends. Then it ends
    when something else of this pipeline begins in the same thread, or else with the whole backward pass.

    Args:
        noticed: whether its end will be noticed, so that what follows does not mean anything: nodes of two cells can
            take turns in one thread

    Attributes:
        task: the backward pass that it belongs to
    """

    __slots__ = ("_end", "_source", "task")

    def __init__(self, step: Step, i: int, j: int, stream: Any, noticed: bool) -> None:
        self._end: End | None = begin(step, "backward", i, j, None, stream)
        self._source = step.source
        self.task = current_pass()
        if not noticed:
            _thread.open[step.source] = self
        at_end_of_pass(self.end)

    def end(self) -> None:
        """The first call counts."""
        end, self._end = self._end, None
        if end is not None:
            if _thread.open.get(self._source) is self:
                del _thread.open[self._source]
            end(False)

    def followed(self) -> None:
        """Something begins in this thread: in the same backward pass, or else that one was given up."""
        if current_pass() == self.task:
            self.end()
        self._end = None


class _Thread(threading.local):
    """What is open in a thread and ends when it is followed, by source."""

    def __init__(self) -> None:
        self.open: dict[object, Open] = {}


_thread = _Thread()
