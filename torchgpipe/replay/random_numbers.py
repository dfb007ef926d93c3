"""Random numbers of a program: each micro-batch has a seed, and its numbers follow it from device to device.

So dropout is the same for any partitions, schedule, checkpoint mode and number of devices. While a cell runs, the
generators of the CPU and of the device have the state that the micro-batch has left in its last cell; afterwards they
get their own state back. A generator serves one cell at a time. The CPU has one for all threads, so one thread runs
all cells if they draw from it.

Only models that draw pay. Whether a model draws is seen when it first runs, for each set of training modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchgpipe.devices.generators import OUTSIDE, Generator, generators_of, generators_of_all, go_on_from, state_of
from torchgpipe.replay.callers_generator import CallersGenerator

__all__ = ["Draws", "RandomNumbers", "modes_of"]


class Draws(NamedTuple):
    """What a model draws from.

    Attributes:
        cpu: whether it draws from the generator of the CPU
        device: whether it draws from generators of accelerators
        python: whether it draws from that of Python's ``random``
        numpy: whether it draws from that of ``numpy.random``
    """

    cpu: bool
    device: bool
    python: bool
    numpy: bool


_ALL = Draws(True, True, True, True)

#: For a model, and the modes of all modules in it, what it draws from.
_known: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Draws]] = WeakKeyDictionary()


class RandomNumbers:
    """The random numbers of a mini-batch.

    Args:
        model: the model; None if nothing is to be known of it, not even afterwards
        devices: the devices that it computes on
        modes: what `modes_of` returns for the model, if that is known

    Attributes:
        callers_generator: the generator of the CPU, which the caller draws from as well
        follows: the generators that follow the micro-batches
        seed: the seed of the mini-batch, which may come from another process; 0 if nothing is drawn
    """

    def __init__(
        self, model: nn.Module | None, devices: Iterable[torch.device] = (), modes: tuple[Any, ...] | None = None
    ) -> None:
        self._model, self._modes = model, modes or (() if model is None else modes_of(model))
        self._draws = None if model is None else _known.get(model, {}).get(self._modes)
        self.follows = self._draws or _ALL
        self._drawn = [False] * len(_ALL)
        #: By micro-batch and kind of generator, the state that the micro-batch has left in its last cell.
        self._states: dict[int, dict[int, Tensor]] = {}
        self.seed = 0
        #: The states of the caller's generator before and after the seeds were drawn from it.
        self._seeded: tuple[Tensor, Tensor] | None = None
        if any(self.follows):  # The model is not known to draw nothing.
            before = state_of(torch.default_generator)
            self.seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
            self._seeded = before, state_of(torch.default_generator)
        #: The states of generators that should not be drawn from. Python's and NumPy's are for all threads, such as
        #: those that load data; `Run` looks at what cells draw.
        self._unused = {
            generator: state_of(generator)
            for generator in generators_of_all(devices)
            if not self.follows[_kind_of(generator)] and generator not in OUTSIDE
        }
        self.callers_generator = CallersGenerator()

    @property
    def are_of_the_process(self) -> bool:
        """Whether cells draw, or may draw, from generators that all threads share."""
        return self.follows.cpu or self.follows.python or self.follows.numpy

    @property
    def drawn(self) -> Draws:
        """What has been drawn from so far, as far as generators have followed micro-batches."""
        return Draws(*self._drawn)

    def following(self, device: torch.device) -> list[Generator]:
        """Return the generators of a device that follow the micro-batches."""
        if not any(self.follows):
            return []
        return [generator for generator in generators_of(device) if self.follows[_kind_of(generator)]]

    def of(self, i: int, device: torch.device) -> AbstractContextManager[None]:
        """Let the generators follow micro-batch ``i`` in a ``with`` block."""
        generators = self.following(device)
        return self._followed(i, generators) if generators else _nothing

    @contextmanager
    def _followed(self, i: int, generators: list[Generator]) -> Iterator[None]:
        states = self._states.setdefault(i, {})
        seed = _seed(self.seed, i)
        callers = [state_of(generator) for generator in generators]
        try:
            for generator in generators:
                # What the generator of an accelerator has come to on one device goes on on the next.
                go_on_from(generator, states.get(_kind_of(generator), seed))
            begun = [state_of(generator) for generator in generators]
            try:
                yield
            finally:
                for generator, before in zip(generators, begun):
                    kind, state = _kind_of(generator), state_of(generator)
                    states[kind] = state
                    # No `|=`, which reads first: another worker's True would be lost.
                    if not torch.equal(state, before):
                        self._drawn[kind] = True
        finally:
            for generator, state in zip(generators, callers):
                go_on_from(generator, state)

    def replicated(self, i: int) -> AbstractContextManager[None]:
        """Let the generators follow what all processes draw for micro-batch ``i`` in a ``with`` block."""
        return self.of(~i, torch.device("cpu"))

    def state(self, i: int) -> dict[int, Tensor]:
        """Return the states that micro-batch ``i`` has left in its last cell, which may go on in another process."""
        return self._states.setdefault(i, {})

    def states_now(self, device: torch.device) -> dict[int, Tensor]:
        """Return the states of the generators that follow a micro-batch, within the block of `of`."""
        return {_kind_of(generator): state_of(generator) for generator in self.following(device)}

    def also(self, drawn: Draws) -> None:
        """Note what other processes have drawn from."""
        for k, has_drawn in enumerate(drawn):
            self._drawn[k] |= has_drawn

    def end(self, *, counts: bool, recomputes: bool) -> None:
        """Note what the model draws from. If it draws nothing, the caller's generator is as if nothing had been drawn.

        Args:
            counts: whether this mini-batch tells; without rows, layers that draw have drawn nothing
            recomputes: whether anything runs, or has run, again at backward, as far as that is known

        Raises:
            RuntimeError: the model was known to draw nothing, but has drawn; a recomputation may draw other numbers.
        """
        unseen = [
            str(generator.device)
            for generator, state in self._unused.items()
            if not torch.equal(state_of(generator), state)
        ]
        draws = self._draws or self.drawn
        if unseen:
            draws = draws._replace(cpu=True, device=True)
        if self._model is not None and (counts or unseen):
            _known.setdefault(self._model, {})[self._modes] = draws
        if unseen and recomputes:
            raise RuntimeError(
                f"random numbers were drawn from the generator of {' and '.join(unseen)} in this mini-batch, though "
                "the model drew none before, so micro-batches have drawn in no certain order, and a recomputation may "
                "draw others; run it again: from now on, micro-batches have seeds"
            )
        if self._seeded is not None and not any(draws):
            before, after = self._seeded
            if torch.equal(state_of(torch.default_generator), after):
                go_on_from(torch.default_generator, before)


_nothing = nullcontext()


def _kind_of(generator: Generator) -> int:
    """Return the place of a generator in `Draws`."""
    return OUTSIDE.index(generator) + 2 if generator in OUTSIDE else int(generator.device.type != "cpu")


def modes_of(model: nn.Module) -> tuple[Any, ...]:
    """Return what tells a model that draws from one that does not: its modules, their modes, and their dropout."""
    return tuple([(type(child), child.training, _dropout(vars(child).get("p"))) for child in model.modules()])


def _dropout(p: Any) -> float | None:
    """Return 0 or 1 where dropout draws nothing, and 0.5 for all between, or each step of a ramp would be a model."""
    if not isinstance(p, int | float):  # Not a module's dropout, and perhaps nothing that can be looked up.
        return None
    return p if p in (0, 1) else 0.5


def _seed(base: int, i: int) -> int:
    """Return a seed of 32 bits, all that the generator of the CPU uses, by the mixing function of SplitMix64.

    Source: G. L. Steele, D. Lea, C. H. Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """
    value = (base + (i + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 31
    return (value ^ (value >> 32)) & 0xFFFFFFFF
