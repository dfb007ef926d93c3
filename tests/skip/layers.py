"""The smallest layers with a skip, for tests of a skip's way rather than of its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchgpipe.skip import Namespace, Skippable, pop, skippable, stash

__all__ = ["Pop", "Stash", "pair"]


@skippable(stash=["skip"])
class Stash(Skippable, nn.Module):
    """A layer that stashes ``function(x)`` and returns another tensor."""

    def __init__(self, function: Callable[[Tensor], Any] = lambda x: x * 2) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", self.function(x))
        return x.sin()


@skippable(pop=["skip"])
class Pop(Skippable, nn.Module):
    """A layer that returns ``function(x, skip)``."""

    def __init__(self, function: Callable[[Tensor, Any], Tensor] = lambda x, skip: x + skip.tanh()) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return self.function(x, skip)


def pair(*options: Any) -> tuple[Any, Any]:
    """Return a `Stash` and its `Pop`."""
    ns = Namespace()
    return Stash(*options[:1]).isolate(ns), Pop(*options[1:]).isolate(ns)
