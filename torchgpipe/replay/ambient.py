"""What the caller has set around the call, and every layer must find set as well.

Autocast, inference mode, modes, hooks and context variables are bound to a thread and to a ``with`` block. A
layer may run in a worker thread, which starts with none of them, or again at backward, long after the block
was left and perhaps inside another one. So all of it is captured once, when the pipeline is called, and entered
wherever a layer runs for that call.

PyTorch has no public call that lists a thread's modes and hooks; what is private about it is in this file only.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

from torchgpipe.devices.backward_pass import current_pass
from torchgpipe.replay.phase import current_phase, enter_phase

__all__ = ["Ambient"]

T = TypeVar("T")

_autograd: Any = torch._C._autograd
_function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
_dispatch_modes: Callable[[], list[Any]] = dispatch._get_current_dispatch_mode_stack
_len_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_len_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class Ambient:
    """The state of the thread that creates it, to be entered in others or later."""

    __slots__ = (
        "_autocast",
        "_context",
        "_dispatch_modes",
        "_found_plain",
        "_function_modes",
        "_grad_enabled",
        "_inference",
        "_phase",
        "_plain",
        "_saved_tensors_hooks",
        "autocast_caches",
        "builds_graph",
    )

    def __init__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = _AutocastState()
        self._saved_tensors_hooks = _top_saved_tensors_hooks()
        # The default device is a function mode too.
        self._function_modes: list[Any] = _function_modes()
        self._dispatch_modes: list[Any] = _dispatch_modes()
        self._context = contextvars.copy_context()
        self._phase = current_phase()
        self._plain = _is_plain() and self._autocast == _default_autocast()
        self._found_plain: tuple[int, int] | None = None
        #: Whether operations leave a graph.
        self.builds_graph = self._grad_enabled and not self._inference
        #: Whether autocast keeps the casted weights of a run for the next one.
        self.autocast_caches = self._autocast.enabled and self._autocast.cache

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Calls ``function`` in this state and puts the thread's own state back."""
        # A context can be entered once at a time only, so every run has a copy, as every task of asyncio has.
        return self._context.copy().run(self._run, function, *args)

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        previous = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._grad_enabled)
        try:
            if self._plain and self._finds_plain():
                return function(*args)
            with ExitStack() as stack:
                for guard in self._guards():
                    stack.enter_context(guard)
                return function(*args)
        finally:
            torch._C._set_grad_enabled(previous)

    def _finds_plain(self) -> bool:
        """Whether this thread has nothing set. Looked at once for each backward pass: nobody sets any in it."""
        here = current_pass(), get_ident()
        if self._found_plain != here:
            if not (_is_plain() and _has_default_dtypes()):
                return False
            self._found_plain = here
        return True

    def _guards(self) -> Iterator[AbstractContextManager[Any]]:
        """What has to be entered for this thread to be in this state: only what differs, for speed."""
        if torch.is_inference_mode_enabled() != self._inference:
            yield torch.inference_mode(self._inference)
            yield torch.set_grad_enabled(self._grad_enabled)  # which inference mode has changed
        if self._autocast != _AutocastState():
            yield self._autocast.enter()
        if _top_saved_tensors_hooks() != self._saved_tensors_hooks:
            yield _saved_tensors_hooks(self._saved_tensors_hooks)
        if self._function_modes or _len_function_modes():
            yield _modes(self._function_modes, _function_modes, overrides._push_mode, overrides._pop_mode)
        if self._dispatch_modes or _len_dispatch_modes():
            yield _modes(self._dispatch_modes, _dispatch_modes, dispatch._push_mode, dispatch._pop_mode)
        if current_phase() != self._phase:
            yield enter_phase(self._phase)


def _is_plain() -> bool:
    """Whether nothing is set in this thread, but for grad mode and context variables."""
    return not (
        torch.is_inference_mode_enabled()
        or _any_autocast()
        or _top_saved_tensors_hooks()
        or _len_function_modes()
        or _len_dispatch_modes()
        or any(current_phase())
    )


def _has_default_dtypes() -> bool:
    """Whether a layer that enters autocast would get the dtypes of a new thread: of the CPU and of CUDA at least."""
    default = _default_autocast()
    return torch.is_autocast_cache_enabled() == default.cache and all(
        [torch.get_autocast_dtype(kind) == dtype for kind, _, dtype in default.types[:2]]
    )


def _any_autocast() -> bool:
    # Three device types are missing in PyTorch's own count.
    return torch._C._is_any_autocast_enabled() or any(
        [torch.is_autocast_enabled(kind) for kind in ("mps", "mtia", "maia")]
    )


class _AutocastState:
    """Autocast of every device type: on or off, its dtype, and whether casts are cached."""

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
            # As torch.autocast does: casts live until the outermost block ends.
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            previous._set()

    def _set(self) -> None:
        torch.set_autocast_cache_enabled(self.cache)
        for kind, enabled, dtype in self.types:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


@cache
def _default_autocast() -> _AutocastState:
    """What a new thread starts with."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_AutocastState).result()


@cache
def _autocast_types() -> tuple[str, ...]:
    """The device types of this build that have autocast."""
    kinds = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu", torch._C._get_privateuse1_backend_name())
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def _top_saved_tensors_hooks() -> Any:
    return _autograd._top_saved_tensors_default_hooks(False)


@contextmanager
def _saved_tensors_hooks(hooks: tuple[Any, Any] | None) -> Iterator[None]:
    # Only the topmost pair acts, so that one is all there is to enter. No pair, inside a block that has one,
    # is a pair that changes nothing.
    forbidden = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if forbidden is not None:
        _autograd._saved_tensors_hooks_enable()
    _autograd._push_saved_tensors_default_hooks(*(hooks or (_as_it_is, _as_it_is)))
    try:
        yield
    finally:
        _autograd._pop_saved_tensors_default_hooks()
        if forbidden is not None:
            _autograd._saved_tensors_hooks_disable(forbidden)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def _modes(
    wanted: list[Any], current: Callable[[], list[Any]], push: Callable[[Any], None], pop: Callable[[], Any]
) -> Iterator[None]:
    """Replaces a thread's stack of modes without the modes' own ``__enter__``, which may reset what they count."""
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
