"""What the engine tells a listener about its work: that something begins on a stream, and that it has ended.

The engine knows no more of a timeline than this. Without a listener nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

__all__ = ["NO_MICRO_BATCH", "End", "Heard", "Kind", "Listener", "Place", "Recorder", "recorded", "unheard"]

#: The kinds of work. A step may run the backward of a cell in two halves. A copy goes to a later partition, or brings a
#: gradient back from there; a wait is the time that the computation waits for such a copy. An upload copies weights or
#: activations from host memory to a device, and a download gradients or activations to host memory.
Kind = Literal[
    "forward",
    "recomputation",
    "backward",
    "backward of the input",
    "backward of the weights",
    "copy",
    "wait",
    "upload",
    "download",
]

#: In the place of a micro-batch: weights and their gradients belong to none.
NO_MICRO_BATCH = -1


class Place(NamedTuple):
    """A partition, as a listener sees it.

    Attributes:
        stream: the stream that it computes on
        layers: the names of its layers
    """

    stream: Any
    layers: Sequence[str]


#: Is called when the work has been launched, in whatever thread; the argument says whether the work has failed.
End = Callable[[bool], None]


class Listener(Protocol):
    """Listens to one mini-batch, its backward included."""

    def begin(self, kind: Kind, i: int, j: int, other: int | None, stream: Any) -> End:
        """Note that work begins.

        Args:
            kind: the kind of work
            i: the micro-batch, or `NO_MICRO_BATCH`
            j: the partition that works, or sends
            other: the partition that a copy goes to, or that a wait is for; None for other kinds
            stream: the stream that the work is launched on

        Returns:
            the function that notes the end; it is called once
        """


class Recorder(Protocol):
    """Listens to a model."""

    def begin_step(self, m: int, places: Sequence[Place]) -> Listener:
        """Note that a mini-batch begins, and return its listener.

        Args:
            m: the number of micro-batches
            places: the partitions
        """


def recorded(
    listener: Listener | None, kind: Kind, i: int, j: int, other: int | None, stream: Any
) -> AbstractContextManager[None]:
    """Tell the listener, if there is one, of the work in a ``with`` block; see `Listener.begin`."""
    return _unheard if listener is None else _Recorded(listener.begin(kind, i, j, other, stream))


#: Tells the listener, if there is one, of work on a stream in a ``with`` block.
Heard: TypeAlias = Callable[[Any], AbstractContextManager[None]]


def unheard(stream: Any) -> AbstractContextManager[None]:
    """Tell nobody; see `Heard`."""
    return _unheard


_unheard = nullcontext()


class _Recorded:
    # A generator would cost as much again as everything that it tells.

    __slots__ = ("_end",)

    def __init__(self, end: End) -> None:
        self._end = end

    def __enter__(self) -> None:
        pass

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        self._end(raised is not None)
