"""A step that runs out of memory is run again, with less memory.

The step that failed leaves ``.grad`` as it was. Buffers and generators of random numbers are put back here, so the next
try computes what the first one would have computed: to the last bit, as long as the micro-batches are the same. Each
remedy is tried once in the life of a model, the cheapest first, and stays for later steps.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from torchgpipe.devices.generators import generators_of_all, go_on_from, state_of
from torchgpipe.devices.memory import ran_out_of_memory, return_freed
from torchgpipe.model.untouched import Buffers, python_random_states, set_python_random_states

__all__ = ["OnShortage", "Remedy", "Retry", "double_chunks", "verify_on_oom"]

T = TypeVar("T")

#: What a step does that runs out of memory: it raises the error, or tries again with less.
OnShortage: TypeAlias = Literal["raise", "retry"]


def verify_on_oom(on_oom: Any) -> OnShortage:
    """Return what a step does that runs out of memory.

    Raises:
        ValueError: it is neither ``'raise'`` nor ``'retry'``.
    """
    if on_oom not in ("raise", "retry"):
        raise ValueError(f"on_oom must be 'raise' or 'retry', but got {on_oom!r}")
    return on_oom  # type: ignore[no-any-return]


class Remedy(NamedTuple):
    """A way to take less memory.

    Attributes:
        name: names the remedy, which is tried once
        apply: changes the model, and returns what was changed and what that costs; '' if it has no use here
    """

    name: str
    apply: Callable[[], str]


def double_chunks(settings: Any, rows: int) -> str:
    """Double ``settings.chunks`` if a mini-batch has the rows, and return what that means; '' if it has not."""
    if rows < 2 * settings.chunks:
        return ""
    settings.chunks *= 2
    return f"chunks={settings.chunks} from now on, so sums are rounded differently and kernels are smaller"


class Retry:
    """The remedies that a model has tried."""

    def __init__(self) -> None:
        self._tried: set[str] = set()

    def run(
        self,
        step: Callable[[], T],
        model: nn.Module,
        devices: Iterable[torch.device],
        remedies: Iterable[Remedy],
        stacklevel: int,
    ) -> T:
        """Return what a step returns, after as many tries as there are remedies.

        Args:
            step: runs the step
            model: the model
            devices: the devices that it computes on
            remedies: the ways to take less memory, the cheapest first
            stacklevel: as for :func:`warnings.warn`, from the caller of this function on

        Raises:
            Exception: what the step raises, if memory has not run out, or nothing is left to try.

        Warns:
            UserWarning: what was changed, and what it costs.
        """
        put_back, pending = _putting_back(model, devices), self._applied(remedies)
        while True:
            try:
                return step()
            except Exception as error:
                said = next(pending, None) if ran_out_of_memory(error) else ""
                if said is None:
                    error.add_note("on_oom='retry' has tried everything that takes less memory")
                if not said:
                    raise
            # Behind the handler, where the error is gone, and the tensors in its frames with it.
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            return_freed()
            put_back()
            warnings.warn(f"a step ran out of memory, and runs again: {said}", UserWarning, stacklevel + 1)

    def _applied(self, remedies: Iterable[Remedy]) -> Iterator[str]:
        """Apply one remedy after the other, and yield what was changed."""
        for name, apply in (Remedy("cache", lambda: "freed what allocators keep; nothing else was changed"), *remedies):
            if name not in self._tried:
                said = apply()
                if said:
                    self._tried.add(name)
                    yield said


def _putting_back(model: nn.Module, devices: Iterable[torch.device]) -> Callable[[], None]:
    """Return what puts buffers and generators of random numbers back to where they are now."""
    buffers, of_python = Buffers(model), python_random_states()
    states = {generator: state_of(generator) for generator in generators_of_all(devices)}

    def put_back() -> None:
        buffers.restore()
        set_python_random_states(of_python)
        for generator, state in states.items():
            go_on_from(generator, state)

    return put_back
