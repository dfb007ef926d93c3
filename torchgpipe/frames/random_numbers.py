"""Random numbers of frames: each micro-batch has a seed, and its numbers follow it from device to device.

So dropout is the same for any partitions, schedule and number of devices. While a frame runs in a column, the
generators of the CPU and of the device have the state that the frame has left in its last column; afterwards they get
their own state back. A generator serves one frame at a time. The CPU has one for all threads, so frames that draw from
it run one after the other.

Only models that draw pay. Whether a model draws is seen when it first runs, for each set of training modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from torchgpipe.devices.generators import generators_of, go_on_from, state_of
from torchgpipe.replay.callers_generator import CallersGenerator
from torchgpipe.replay.seeds import Draws, Watch, borrowed, cpu_lock, drawing_from_cpu, mixed, sharing

__all__ = ["RandomNumbers"]


class RandomNumbers:
    """The random numbers of a mini-batch.

    Args:
        draws: what the model draws from; None if that is unknown
        devices: the devices of the columns; needed where it is known

    Attributes:
        callers_generator: the generator of the CPU, which the caller draws from as well
    """

    def __init__(self, draws: Draws | None, devices: Iterable[torch.device] = ()) -> None:
        self._draws = draws
        self._swaps = draws or Draws(True, True)
        self._drawn = [False, False]
        #: By micro-batch and kind of generator, the state that the frame has left in its last column.
        self._states: dict[int, dict[bool, Tensor]] = {}
        found = [generator for device in devices for generator in generators_of(device)]
        with cpu_lock():
            self._watch = Watch([one for one in found if not self._swaps[one.device.type != "cpu"]])
            self.callers_generator = CallersGenerator()
        self._source = torch.Generator()
        self._source.set_state(self.callers_generator.before)
        # From a copy of the caller's generator, which goes on only if the model draws.
        self._base = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu", generator=self._source))

    @contextmanager
    def of(self, i: int, device: torch.device) -> Iterator[None]:
        """Let the generators follow micro-batch ``i`` in a ``with`` block."""
        # By whether it is of an accelerator: what such a generator has come to on one device goes on on the next.
        found = {one.device.type != "cpu": one for one in generators_of(device)} if any(self._swaps) else {}
        generators = {kind: one for kind, one in found.items() if self._swaps[kind]}
        if not generators:
            yield
            return
        states = self._states.setdefault(i, {})
        with borrowed({one: states.get(kind, mixed(self._base, i, 0)) for kind, one in generators.items()}) as begun:
            try:
                yield
            finally:
                for (kind, generator), state in zip(generators.items(), begun):
                    states[kind] = state_of(generator)
                    self._drawn[kind] |= not torch.equal(states[kind], state)

    def backward(self) -> AbstractContextManager[None]:
        """Let what is recomputed in a ``with`` block draw what it has drawn: nobody else draws meanwhile."""
        return sharing([torch.default_generator]) if self._swaps.cpu else nullcontext()

    @property
    def drawn(self) -> Draws:
        """What has been drawn from so far, as far as `of` has swapped generators."""
        return Draws(*self._drawn)

    def end(self) -> Draws:
        """Let the caller's generator go on if the model draws, and return what the model draws from."""
        if self._draws is None:
            self._draws = Draws(*self._drawn)
        if any(self._draws):
            with drawing_from_cpu():
                go_on_from(torch.default_generator, self._source.get_state())
        return self._draws

    def drawn_unseen(self) -> list[str]:
        """Return the devices whose generators were drawn from, although the model was known not to."""
        return self._watch.drawn_from()
