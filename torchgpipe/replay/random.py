"""Replay random numbers: the second run of a layer must draw what the first run drew.

A layer draws from the generator of the CPU, of its own device, of Python or of NumPy, or from a generator that is one
of its attributes. The states of all these generators are noted before and after the first run of a checkpointed cell. A
state that differs is kept, and the second run starts from it. So a cell that drew nothing restores nothing, and it does
not matter what is drawn between the two runs.

The CPU has one generator for all threads. If two cells drew from it at the same time, each would get a part of one
sequence, and no state would bring its part back. So one thread runs the cells of the CPU. Cells on accelerators run
beside them and should draw from their own devices. If such a cell draws from the generator of the CPU while another one
does, its second run comes to another state, which is an error. Two second runs take turns.

Python and NumPy have one generator each for all threads, too, and threads that load data may draw from it. So a state
that differs does not tell that a layer has drawn. It is replayed in any case, and what the second run returns is
compared.

A layer may get a new generator between the call and backward, whose states were not noted. Then recomputation raises
an error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.generators import OUTSIDE, Generator, generators_of, generators_of_all, go_on_from, state_of
from torchgpipe.devices.torch_internals import current_pass, dispatch_modes, without_dispatch_modes

__all__ = ["Drawn", "RandomStates", "generator_states", "generators_in", "restored_generators"]


class _Draw(NamedTuple):
    generator: Generator
    before: Tensor
    after: int  # the hash of the state after the run; the state itself takes kilobytes


#: The draws of a run, one for each generator that was drawn from.
Drawn = tuple[_Draw, ...]

_nothing = nullcontext()


class RandomStates:
    """Notes the random numbers that the cells of one device draw.

    Args:
        device: the device of the cells
        modules: all modules on the device, which may have generators
        between: whether other cells may draw from the generators between two cells
        generators: those of the device that the cells may draw from, beside those of layers, Python and NumPy; None for
            all. What another thread draws from the others is not noted, and so not replayed
    """

    def __init__(
        self,
        device: torch.device,
        modules: Iterable[nn.Module],
        *,
        between: bool,
        generators: Sequence[Generator] | None = None,
    ) -> None:
        found = generators_of(device) if generators is None else (*generators, *OUTSIDE)
        self._of_the_device = tuple(dict.fromkeys(found))
        self._modules = modules
        self._between = between
        self._last: list[Tensor] | None = None  # the end of the last run, where the next run begins
        self._checked_in: int | None = None  # the last backward pass that found no new generators

    @cached_property
    def _generators(self) -> tuple[Generator, ...]:
        # Looked for when the first checkpointed cell begins.
        return self._of_the_device + generators_in(self._modules)

    def begin(self) -> list[Tensor]:
        """Return the states before a run."""
        return _states_of(self._generators) if self._last is None else self._last

    def end(self, before: list[Tensor]) -> Drawn:
        """Return the draws since ``before``."""
        after = _states_of(self._generators)
        moved = [not _is_same(old, new) for old, new in zip(before, after)]
        if True not in moved:
            # Most cells draw nothing. Keep the old states and drop the new ones at once, so that the next cell reuses
            # their memory: allocating several kilobytes among the small objects of a cell costs more than a copy.
            self._last = None if self._between else before
            return ()
        self._last = None if self._between else after
        return tuple(
            _Draw(generator, old, hash(_bytes_of(new)))
            for generator, old, new, is_moved in zip(self._generators, before, after, moved)
            if is_moved
        )

    def forget(self) -> None:
        """Drop the last states, because numbers may be drawn from now on that are not noted."""
        self._last = None

    def replay(self, drawn: Drawn) -> AbstractContextManager[None]:
        """Let a run draw the same numbers again in a ``with`` block, and restore the generators.

        Raises:
            RuntimeError: the run drew other numbers, or could have done so.
        """
        this_pass = current_pass()
        if self._checked_in != this_pass:
            self._refuse_new_generators()
            self._checked_in = this_pass
        return _replay(drawn) if drawn else _nothing

    def _refuse_new_generators(self) -> None:
        if set(generators_in(self._modules)) - set(self._generators):
            raise RuntimeError(
                "a layer has a random number generator that it did not have when the pipeline was called, so "
                "recomputation could draw other numbers; make the generator with the layer, leave it as it is until "
                "backward() has finished, or use checkpoint='never'"
            )


def _states_of(generators: Sequence[Generator]) -> list[Tensor]:
    with _unseen():
        return [state_of(generator) for generator in generators]


def _unseen() -> AbstractContextManager[None]:
    """Copy and compare states in a ``with`` block in which no mode, such as that of fake tensors, takes part."""
    return without_dispatch_modes() if dispatch_modes() else _nothing


def _bytes_of(state: Tensor) -> bytes:
    """Return the bytes of a state, which are cheaper to compare than tensors."""
    with _unseen():
        return state.numpy().tobytes()


def _is_same(old: Tensor, new: Tensor) -> bool:
    return old is new or _bytes_of(old) == _bytes_of(new)  # Those of Python and NumPy are kept while they last.


#: Held by a second run that draws from generators which all threads share. A layer may run a pipeline within.
_replaying = threading.RLock()


@contextmanager
def _replay(drawn: Drawn) -> Iterator[None]:
    generators = [draw.generator for draw in drawn]
    with _replaying if any([generator.device.type == "cpu" for generator in generators]) else _nothing:
        current = _states_of(generators)
        for draw in drawn:
            go_on_from(draw.generator, draw.before)
        try:
            yield
            for draw in drawn:
                _verify(draw)
        finally:
            for generator, state in zip(generators, current):
                go_on_from(generator, state)


def _verify(draw: _Draw) -> None:
    """Check that a second run has drawn what the first has, or nothing: then another thread drew during the first."""
    (now,) = _states_of([draw.generator])
    if draw.generator not in OUTSIDE and not _is_same(now, draw.before) and hash(_bytes_of(now)) != draw.after:
        raise RuntimeError(
            "recomputation drew other random numbers than the first run; either the layer does not draw the same both "
            "times, or another device or thread drew from the same generator meanwhile: draw on the layer's own device "
            "(device=input.device), let one thread at a time train, or use checkpoint='never'"
        )


@contextmanager
def restored_generators(devices: Iterable[torch.device], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put the generators of the CPU, of devices and of modules back into their states after a ``with`` block."""
    generators = [*generators_of_all(devices), *generators_in(modules)]
    states = [state_of(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            go_on_from(generator, state)


def generator_states(devices: Iterable[torch.device]) -> list[bytes]:
    """Return the states of the generators of the CPU and of devices, to compare."""
    return [*map(_bytes_of, _states_of(generators_of_all(devices)))]


def generators_in(modules: Iterable[nn.Module]) -> tuple[Generator, ...]:
    """Return the generators among the attributes of modules."""
    values = [value for module in modules for value in vars(module).values()]
    # Look at types first: a deep model has tens of thousands of attributes, and hardly a generator among them.
    kinds = {kind for kind in set(map(type, values)) if issubclass(kind, torch.Generator)}
    generators = [value for value in values if type(value) in kinds] if kinds else []
    return tuple(dict.fromkeys(generators))
