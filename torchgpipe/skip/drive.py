"""Run a ``forward`` that is a generator, and carry out the stashes and pops that it yields."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor

from torchgpipe.devices.typing import Leaf
from torchgpipe.skip.tracker import current_skip_tracker

__all__ = ["drive", "pop", "stash"]


class stash:
    """Put a tensor away for a later layer: ``yield stash('name', tensor)``.

    Args:
        name: the name of the skip, as the layer has declared it
        tensor: a tensor of any shape, or None; any other value raises :exc:`TypeError` at the ``yield``
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Leaf) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """Take the tensor that an earlier layer has put away: ``tensor = yield pop('name')``.

    Args:
        name: the name of the skip, as the layer has declared it
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


#: The declared stashes and pops that a call has not carried out yet: pairs of `stash` or `pop` and a name.
_Open = set[tuple[type, str]]


class _Driving(threading.local):
    """The skippable layer that this thread is running, and what the layer still has to do."""

    def __init__(self) -> None:  # in every thread
        self.layer: Any = None
        self.open: _Open = set()


_driving = _Driving()


def drive(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``forward`` that runs the given one to its end if that is a generator."""

    @functools.wraps(forward)
    def driven(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, outer_open = _driving.layer, _driving.open
        if outer is self:  # super().forward(...), a part of the layer's call
            return _run(self, forward(self, *args, **kwargs), outer_open)
        open_: _Open = {(stash, name) for name in self.stashable_names}
        open_.update([(pop, name) for name in self.poppable_names])
        _driving.layer, _driving.open = self, open_
        try:
            output = _run(self, forward(self, *args, **kwargs), open_)
        finally:
            _driving.layer, _driving.open = outer, outer_open
        if open_:
            names = ", ".join(sorted(f"{kind.__name__}('{name}')" for kind, name in open_))
            raise RuntimeError(
                f"{type(self).__name__} has declared but not done: {names}; yield each declared name at every call "
                "(None can be stashed), or do not declare it"
            )
        return output

    return driven


def _run(layer: Any, steps: Any, open_: _Open) -> Any:
    """Carry out what a ``forward`` yields, and return its output."""
    if not isinstance(steps, Generator):
        return steps
    try:
        step = next(steps)
        while True:
            try:
                reply = _do(layer, step, open_)
            except BaseException as error:
                # Raised at the yield, so that the traceback shows that line, and the layer leaves its `with` blocks.
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        return end.value


def _do(layer: Any, step: Any, open_: _Open) -> Leaf:
    """Carry out one step that a layer has yielded, and return the reply."""
    kind = type(layer).__name__
    if isinstance(step, stash):
        if step.name not in layer.stashable_names:
            raise RuntimeError(f"'{step.name}' has not been declared as stashable by {kind}: @skippable(stash=[...])")
        if not (step.tensor is None or isinstance(step.tensor, Tensor)):
            raise TypeError(
                f"{kind} stashes '{step.name}', which is {type(step.tensor).__name__}, but only a tensor or None can "
                "be stashed; stash each tensor under its own name"
            )
        current_skip_tracker().stash(layer.skip_key(step.name), step.tensor, layer)
        open_.discard((stash, step.name))
        return None
    if isinstance(step, pop):
        if step.name not in layer.poppable_names:
            raise RuntimeError(f"'{step.name}' has not been declared as poppable by {kind}: @skippable(pop=[...])")
        try:
            tensor = current_skip_tracker().pop(layer.skip_key(step.name))
        except KeyError:
            raise RuntimeError(
                f"{kind} pops '{step.name}', which no earlier layer has stashed, or which was popped already; stash "
                "it in a layer before, in the same namespace, and pop it once"
            ) from None
        open_.discard((pop, step.name))
        return tensor
    raise TypeError(f"{kind} yielded {type(step).__name__}, but a skippable layer yields stash(...) and pop(...) only")
