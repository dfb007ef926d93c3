"""Wind up threads although signals interrupt the thread that waits for them.

Python runs signal handlers in the main thread, in the midst of what that does, and Ctrl-C raises there. A thread that
nobody waits for would go on with the layers of the user, and change ``.grad``, after the caller has seen the exception.

`threading.Thread.join` is of no use for that: in Python 3.11, a join that is interrupted marks the thread as stopped,
and the next join returns at once. So threads tell by locks and queues that they have finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

__all__ = ["join", "uninterrupted"]


def uninterrupted(work: Callable[[], object]) -> None:
    """Do ``work``, all over again if a signal interrupts it, and raise the interrupt afterwards.

    Args:
        work: may be repeated

    Raises:
        BaseException: what has interrupted the work; or what the work raises itself, twice in a row
    """
    interrupt: BaseException | None = None
    while True:
        try:
            work()
            break
        except BaseException as error:
            failed_again = isinstance(error, Exception) and type(error) is type(interrupt)
            interrupt = error
            if failed_again:  # By itself: it would for ever.
                break
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            del interrupt  # A frame that holds its own exception is a cycle, which would keep tensors alive.


def join(threads: Iterable[threading.Thread]) -> None:
    """Let threads end that have nothing left to do; some may never have started."""
    for thread in threads:
        if thread.is_alive():
            thread.join()
