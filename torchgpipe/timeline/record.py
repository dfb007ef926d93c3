"""What the engine tells about its work, to whoever listens: that something begins on a stream, and that it ends.

The engine knows no more of a timeline than this. Where nobody listens there is no recorder, and nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

__all__ = ["Kind", "Place", "Recorder", "Step", "WhatIsRecorded", "recorded"]

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


class Step(Protocol):
    """Listens to one mini-batch, its backward included."""

    def begin(self, what: WhatIsRecorded, stream: Any) -> Callable[[bool], None]:
        """Is told that ``stream`` is about to do something.

        Returns:
            to be called when that is launched, in whatever thread; its argument says whether it has failed
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
    end = step.begin(what, stream)
    try:
        yield
    except BaseException:
        end(True)
        raise
    end(False)
