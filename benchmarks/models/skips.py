"""The one end of a skip that all models share, and how both ends are told that they belong together."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from torch import Tensor, nn

from torchgpipe.skip import Namespace, skippable, stash

__all__ = ["Stash", "joined"]

M = TypeVar("M", bound=nn.Module)


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Passes its input on, and puts it away for the later layer that pops 'skip' in the same namespace."""

    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", input)
        return input


def joined(layer: M, ns: Namespace) -> M:
    """Put the skips of a layer into a namespace, and return the layer.

    Torchgpipe 0.0.7, which runs these models too, has no `Skippable` to derive from for the type checker.
    """
    skips: Any = layer
    skips.isolate(ns)
    return layer
