"""Seeds for layers: in a step, the random numbers of a layer depend on the step, the micro-batch and the layer only.

So dropout is the same for any balance, schedule, checkpoint mode and number of devices, and a recomputation draws the
numbers of the first run without noting anything.

Only layers that draw pay. The first run of a layer shows what the layer draws from. `LayerSeeds.run` seeds these
generators before every run of the layer, and puts them back afterwards. A generator serves one layer at a time. The CPU
has one for all threads, so layers that draw from it run one after the other, on whatever device they are; layers that
draw from their own accelerator only wait for nobody.

A layer may have a checkpoint of its own, by `torch.utils.checkpoint`: at backward it sets the CPU's generator to its
state in forward, and afterwards back, without a look at other threads. If anything in the step draws from that
generator, its backward takes turns with the others (`LayerSeeds.backward`). Otherwise only the generator itself may be
left in one of these states (`LayerSeeds.end`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from torchgpipe.devices.generators import Generator, generators_of, go_on_from, state_of
from torchgpipe.devices.torch_internals import is_compiled

__all__ = [
    "Draws",
    "LayerSeeds",
    "Watch",
    "borrowed",
    "cpu_lock",
    "current_seeds",
    "drawing_from_cpu",
    "mixed",
    "own_locks",
    "sharing",
]

T = TypeVar("T")


class Draws(NamedTuple):
    """What a layer or a model draws from.

    Attributes:
        cpu: whether it draws from the generator of the CPU
        device: whether it draws from generators of accelerators
    """

    cpu: bool
    device: bool


class _Locks(dict[torch.device, Any]):
    """By device, the lock that is held while the state of its generator is looked at or changed."""

    def __missing__(self, device: torch.device) -> Any:
        return self.setdefault(device, threading.RLock())


#: For a layer, and the training modes of all modules in it, what it draws from.
_draws: WeakKeyDictionary[nn.Module, dict[tuple[bool, ...], Draws]] = WeakKeyDictionary()
_process_locks = _Locks()
#: The locks of this process, or those in their place inside a block that holds some of them.
_locks: ContextVar[_Locks] = ContextVar("torchgpipe_generators", default=_process_locks)


def cpu_lock() -> Any:
    """Return the lock that is held while the state of the CPU's generator is looked at or changed."""
    return _locks.get()[torch.default_generator.device]


@contextmanager
def sharing(generators: Iterable[Generator]) -> Iterator[None]:
    """Hold one or two generators for a ``with`` block; pipelines inside of the block share them among themselves."""
    locks = _locks.get()
    first, *others = [locks[generator.device] for generator in generators]
    with first, others[0] if others else _nothing:
        # A pipeline inside of this block has workers, which must not wait for this thread. As `own_locks`, but faster.
        token = _locks.set(_Locks())
        try:
            yield
        finally:
            _locks.reset(token)


_nothing = nullcontext()


@contextmanager
def borrowed(starts: Mapping[Generator, Tensor | int]) -> Iterator[list[Tensor]]:
    """Let one or two generators go on from states or seeds in a ``with`` block, and put them back afterwards.

    Provide the states that they begin with; nobody else draws from them meanwhile.
    """
    with sharing(starts):
        before = [state_of(generator) for generator in starts]
        for generator, start in starts.items():
            go_on_from(generator, start)
        try:
            yield [state_of(generator) for generator in starts]
        finally:
            for generator, state in zip(starts, before):
                go_on_from(generator, state)


@contextmanager
def own_locks() -> Iterator[None]:
    """Use other locks for generators in a ``with`` block, in a thread for which a worker holds those of the process."""
    token = _locks.set(_Locks())
    try:
        yield
    finally:
        _locks.reset(token)


class Watch:
    """Notice draws from generators, but for those of other pipelines' seeds (see `drawing_from_cpu`).

    Args:
        generators: the generators
    """

    def __init__(self, generators: Iterable[Generator]) -> None:
        with cpu_lock():
            self._states = {generator: state_of(generator) for generator in generators}
            if _locks.get() is _process_locks:
                _watches.add(self)

    def drawn_from(self) -> list[str]:
        """Return the devices whose generators were drawn from."""
        with cpu_lock():
            return [str(one.device) for one, state in self._states.items() if not torch.equal(state_of(one), state)]

    def follow(self, before: Tensor) -> None:
        """Take the present state of the CPU's generator for the one to be, if that was ``before``."""
        generator = torch.default_generator
        if generator in self._states and torch.equal(self._states[generator], before):
            self._states[generator] = state_of(generator)


#: The watches of this process, but for those inside of a block that holds the generator of the CPU.
_watches: WeakSet[Watch] = WeakSet()


@contextmanager
def drawing_from_cpu() -> Iterator[None]:
    """Draw a pipeline's own seed from the generator of the CPU in a ``with`` block, unnoticed by other pipelines."""
    with cpu_lock():
        before = state_of(torch.default_generator)
        yield
        # A pipeline inside of a layer draws on behalf of that layer, which is to be noticed.
        if _locks.get() is _process_locks and current_seeds() is None:
            for watch in _watches:
                watch.follow(before)


class LayerSeeds:
    """The seeds of a step.

    Args:
        partitions: the layers of each partition
        devices: the device of each partition
    """

    def __init__(self, partitions: Iterable[nn.Sequential], devices: Iterable[torch.device]) -> None:
        layers = [(partition, layer) for partition in partitions for layer in partition]
        self._positions: dict[nn.Module, int] = {layer: k for k, (_, layer) in enumerate(layers)}
        self._end = len(layers)
        for partition, layer in layers:
            if is_compiled(partition):  # It runs as one layer, the first.
                self._positions.setdefault(partition, self._positions[layer])
        self._modes = {one: tuple([module.training for module in one.modules()]) for one in self._positions}
        #: The layers that are known to draw nothing.
        self._silent = {one for one, modes in self._modes.items() if _draws.get(one, {}).get(modes) == (False, False)}
        with drawing_from_cpu():
            # Drawn from the generator of the CPU, so that a seed of the user's gives the same steps again.
            self._base = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
            self._before = state_of(torch.default_generator)
        self._watch = Watch([generator for device in devices for generator in generators_of(device)])
        self._seeds: set[int] = set()
        #: Whether anything with a seed has drawn from the generator of the CPU in this step.
        self._draws_from_cpu = False

    def at(self, i: int, device: torch.device) -> AbstractContextManager[None]:
        """Let `Partition` run its layers with the seeds of micro-batch ``i`` in a ``with`` block."""
        return _At(self, i, device)

    def run(self, i: int, device: torch.device, layer: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        """Run a layer on micro-batch ``i``, with its own seed if it draws."""
        # A layer without a position is one of another pipeline, inside a layer of this one.
        if layer in self._silent or layer not in self._positions:
            return layer(*inputs, **keywords)
        modes = self._modes[layer]
        known = _draws.get(layer, {}).get(modes)
        with self._seeded(i, device, self._positions[layer], known) as drawn:
            output = layer(*inputs, **keywords)
            # Without elements, a layer that draws otherwise draws nothing.
            if known is None and not (isinstance(output, Tensor) and output.numel() == 0):
                draws = drawn()
                _draws.setdefault(layer, {})[modes] = draws
                if not any(draws):
                    self._silent.add(layer)
            return output

    def run_loss(self, i: int, device: torch.device, finish: Callable[[int, T], Tensor], output: T) -> Tensor:
        """Compute the loss of micro-batch ``i`` with a seed of its own, whether it draws or not."""
        with self._seeded(i, device, self._end):
            return finish(i, output)

    @contextmanager
    def _seeded(
        self, i: int, device: torch.device, position: int, known: Draws | None = None
    ) -> Iterator[Callable[[], Draws]]:
        """Seed generators for a ``with`` block, and give a function that tells what has been drawn from.

        Args:
            i: the micro-batch
            device: where the layer computes
            position: stands for the layer
            known: what the layer draws from; None if that is not known
        """
        generators, seed = generators_of(device), mixed(self._base, i, position)
        cpu = known is None or known.cpu
        if not cpu:  # Others draw from the CPU's generator meanwhile.
            generators = generators[1:]
        self._seeds.add(seed)
        with borrowed(dict.fromkeys(generators, seed)) as seeded:

            def drawn() -> Draws:
                changed = [not torch.equal(state_of(one), state) for one, state in zip(generators, seeded)]
                return Draws(cpu and changed[0], any(changed[cpu:]))

            try:
                yield drawn
            finally:
                self._draws_from_cpu |= cpu and not torch.equal(state_of(generators[0]), seeded[0])

    def backward(self) -> AbstractContextManager[None]:
        """Let what layers recompute themselves in a ``with`` block draw what it has drawn: nobody else draws meanwhile.

        A backward comes after all layers and the loss have run once, so it is known by then whether they draw.
        """
        return sharing([torch.default_generator]) if self._draws_from_cpu else _nothing

    def end(self) -> None:
        """Put the generator of the CPU back where it was, if two layers have recomputed at once and left a seed there.

        What hooks have drawn at backward stays drawn.
        """
        with cpu_lock():
            now = state_of(torch.default_generator)
            if not torch.equal(now, self._before) and any([torch.equal(now, _seeded(seed)) for seed in self._seeds]):
                go_on_from(torch.default_generator, self._before)

    def verify(self) -> None:
        """Check, after a step with recomputations, that no layer without a seed has drawn.

        Raises:
            RuntimeError: a layer may have drawn other numbers in its recomputation. From now on all have seeds.
        """
        drawn_from = self._watch.drawn_from()
        if not drawn_from:
            return
        asked = Draws("cpu" in drawn_from, drawn_from != ["cpu"])
        known = [_draws.get(layer, {}).get(self._modes[layer]) or asked for layer in self._positions]
        if all(draws.cpu >= asked.cpu and draws.device >= asked.device for draws in known):
            return  # The draw was elsewhere: in another thread, or in backward.
        for layer, modes in self._modes.items():
            _draws.setdefault(layer, {})[modes] = Draws(True, True)
        raise RuntimeError(
            f"random numbers were drawn from the generator of {' and '.join(drawn_from)} during this step, perhaps by "
            "a layer that drew none when it first ran, so a recomputation may have drawn others, and the gradients of "
            "this step are dropped; call step() again: all layers have seeds from now on"
        )


#: What runs a layer with its seed.
_current: ContextVar[Callable[..., Any] | None] = ContextVar("torchgpipe_layer_seeds", default=None)


class _At:
    __slots__ = ("_run", "_token")

    def __init__(self, seeds: LayerSeeds, i: int, device: torch.device) -> None:
        self._run = partial(seeds.run, i, device)

    def __enter__(self) -> None:
        self._token = _current.set(self._run)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def current_seeds() -> Callable[..., Any] | None:
    """Return what runs a layer with its seed, as ``run(layer, *inputs)``, or None outside of a step."""
    return _current.get()


def _seeded(seed: int) -> Tensor:
    return state_of(torch.Generator().manual_seed(seed))


def mixed(base: int, i: int, position: int) -> int:
    """Return a seed of 32 bits, all that the generator of the CPU uses, by the mixing function of SplitMix64.

    Source: G. L. Steele, D. Lea, C. H. Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """
    value = base
    for part in (i, position):
        value = (value + (part + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return (value ^ (value >> 32)) & 0xFFFFFFFF
