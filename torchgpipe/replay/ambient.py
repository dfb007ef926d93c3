"""Carry the settings around the call of a pipeline to every run of a layer.

Autocast, inference mode, modes, hooks and context variables are bound to a thread and to a ``with`` block. A layer may
run in a worker thread, which starts without them, or again at backward, long after the block has ended and perhaps
inside another block. So the settings are captured once, when the pipeline is called, and entered wherever a layer runs
for that call.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.devices.torch_internals import (
    classes_handle_operations,
    current_pass,
    dispatch_modes,
    function_modes,
    handling_operations,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    saved_tensors_hooks_in_use,
)
from torchgpipe.replay.phase import current_phase, enter_phase

__all__ = ["Ambient"]

T = TypeVar("T")


class Ambient:
    """The settings of the thread that creates this object.

    Attributes:
        builds_graph: whether operations leave a graph
        autocast_caches: whether autocast keeps the cast weights of a run for the next run
    """

    __slots__ = (
        "_autocast",
        "_context",
        "_dispatch_modes",
        "_function_modes",
        "_grad_enabled",
        "_handles_operations",
        "_inference",
        "_phase",
        "_saved_tensors_hooks",
        "_set_already",
        "autocast_caches",
        "builds_graph",
    )

    def __init__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = _AutocastState()
        self._saved_tensors_hooks = saved_tensors_hooks_in_use()
        self._function_modes = function_modes()
        self._dispatch_modes = dispatch_modes()
        self._handles_operations = classes_handle_operations()
        self._context = contextvars.copy_context()
        self._phase = current_phase()
        #: By thread, the last backward pass in which the thread had these settings already.
        self._set_already: dict[int, int] = {}
        self.builds_graph = self._grad_enabled and not self._inference
        self.autocast_caches = self._autocast.enabled and self._autocast.cache

    @contextmanager
    def fresh_casts(self) -> Iterator[None]:
        """Let runs with these settings share the casts of weights in a ``with`` block, and no others.

        Autocast keeps the first cast of a weight, with its node of the graph, for all threads. The node has saved
        nothing, so the graphs of many cells can lead through it, each differentiated by itself. The optimizer may
        change the weights before and after the block.
        """
        forget = torch.clear_autocast_cache if self.autocast_caches else lambda: None
        forget()
        try:
            yield
        finally:
            forget()

    def without_autocast(self) -> AbstractContextManager[Any]:
        """Leave autocast, if these settings have it, to the end of the ``with`` block of what is returned."""
        stack = ExitStack()
        for kind in [kind for kind, enabled, _ in self._autocast.types if enabled]:
            stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` with these settings, and restore the thread's own settings."""
        # A context can be entered only once at a time, so every run enters a copy.
        return self._context.copy().run(self._run, function, *args)

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        thread, this_pass = get_ident(), current_pass()
        with torch.set_grad_enabled(self._grad_enabled):
            # Comparing the settings takes a tenth of the time of a small layer. A thread changes none within a pass.
            if this_pass >= 0 and self._set_already.get(thread) == this_pass:
                return function(*args)
            with ExitStack() as stack:
                entered = [stack.enter_context(guard) for guard in self._guards()]
                if not entered:
                    self._set_already[thread] = this_pass
                return function(*args)

    def _guards(self) -> Iterator[AbstractContextManager[Any]]:
        """Yield a context manager for each setting of this thread that differs."""
        if torch.is_inference_mode_enabled() != self._inference:
            yield torch.inference_mode(self._inference)
            yield torch.set_grad_enabled(self._grad_enabled)  # which inference mode has changed
        if self._autocast != _AutocastState():
            yield self._autocast.enter()
        if saved_tensors_hooks_in_use() != self._saved_tensors_hooks:
            # Only the topmost pair acts, so push only that one. If there was none, push a pair that changes nothing.
            yield saved_tensors_hooks(*(self._saved_tensors_hooks or (_as_it_is, _as_it_is)))
        if self._function_modes or function_modes():
            yield _modes(self._function_modes, function_modes, push_function_mode, pop_function_mode)
        if self._dispatch_modes or dispatch_modes():
            yield _modes(self._dispatch_modes, dispatch_modes, push_dispatch_mode, pop_dispatch_mode)
        if classes_handle_operations() != self._handles_operations:
            yield handling_operations(self._handles_operations)
        if current_phase() != self._phase:
            yield enter_phase(self._phase)


class _AutocastState:
    """The settings of autocast: on or off and a dtype for every device type, and whether casts are cached."""

    __slots__ = ("cache", "enabled", "types")

    def __init__(self) -> None:
        self.cache = torch.is_autocast_cache_enabled()
        self.types = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _autocast_types()
        ]
        self.enabled = any(enabled for _, enabled, _ in self.types)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AutocastState) and (self.cache, self.types) == (other.cache, other.types)

    @contextmanager
    def enter(self) -> Iterator[None]:
        previous = _AutocastState()
        self._set()
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            # Casts live until the outermost block ends, as with `torch.autocast`.
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            previous._set()

    def _set(self) -> None:
        torch.set_autocast_cache_enabled(self.cache)
        for kind, enabled, dtype in self.types:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


@cache
def _autocast_types() -> tuple[str, ...]:
    """Return the device types of this build that have autocast."""
    kinds = ["cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu"]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type not in kinds:
        kinds.append(accelerator.type)  # A backend outside PyTorch has a name of its own.
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def _modes(
    wanted: list[Any], current: Callable[[], list[Any]], push: Callable[[Any], None], pop: Callable[[], Any]
) -> Iterator[None]:
    """Replace the stack of modes of this thread, without calling ``__enter__``: a mode may reset its counts there."""
    previous = current()
    _restack(previous, wanted, push, pop)
    try:
        yield
    finally:
        _restack(wanted, previous, push, pop)


def _restack(old: list[Any], new: list[Any], push: Callable[[Any], None], pop: Callable[[], Any]) -> None:
    for _ in old:
        pop()
    for mode in new:
        push(mode)
