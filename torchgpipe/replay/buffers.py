"""Give a second run the buffers that the first run began with, and keep its changes to itself.

A spectral norm improves its vectors at every run, and computes with them. A second run that starts from improved ones
computes other weights, and improves them once more. So what a first run changes is copied before, and a second run has
copies of all buffers: a batch norm changes its statistics without a new version, and so would not be noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.devices.torch_internals import versions
from torchgpipe.replay.statistics import STATISTICS, Norm

__all__ = ["BufferStates"]


class BufferStates:
    """The buffers of modules before a first run.

    Args:
        modules: the modules

    Attributes:
        modules: those that have buffers
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = [module for module in modules if module._buffers]
        #: For each module, its buffers by name: what a second run begins with.
        self._before = [dict(module._buffers) for module in self.modules]
        self._versions = [versions(values.values()) for values in self._before]
        self._copies = [
            {
                name: _copied(value)
                for name, value in values.items()
                if not (isinstance(module, Norm) and name in STATISTICS)
            }
            for module, values in zip(self.modules, self._before)
        ]

    def end(self) -> None:
        """Keep the copies of buffers that have changed since, after the first run."""
        for module, before, counts, copies in zip(self.modules, self._before, self._versions, self._copies):
            for (name, buffer), count in zip([*before.items()], counts):
                if name in copies and (module._buffers.get(name) is not buffer or versions([buffer]) != [count]):
                    before[name] = copies[name]
        self._copies = []

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Let the modules have copies of the buffers that the first run began with, in a ``with`` block."""
        now = [dict(module._buffers) for module in self.modules]
        try:
            for module, before in zip(self.modules, self._before):
                _assign(module, {name: _copied(value) for name, value in before.items()})
            yield
        finally:
            for module, values in zip(self.modules, now):
                _assign(module, values)


def _copied(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or is_lazy(buffer):
        return buffer
    with torch.no_grad():
        return buffer.clone()


def _assign(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)
