"""The calls inside of a module that hooks see: libraries collect hidden states and the logits of routers in this way.

What a hook keeps may be used between two modules of the spine, so every process must come to have something to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchgpipe.devices.torch_internals import forward_hooks, show_call

__all__ = ["HookedCalls", "show_calls"]


class HookedCalls:
    """The calls of the modules inside of a module behind whose forward there are hooks, until `remove`.

    Args:
        module: the module
        is_needed: whether there may be any

    Attributes:
        names: the names of the modules, in the order of their calls
        seen: of each call, the positional arguments, as far as they are tensors, and the output
    """

    def __init__(self, module: nn.Module, *, is_needed: bool) -> None:
        self.names: list[str] = []
        self.seen: list[Any] = []
        self._handles = [
            child.register_forward_hook(partial(self._note, name))
            for name, child in (module.named_modules() if is_needed else ())
            if forward_hooks(child)[1]
        ]

    def _note(self, name: str, _child: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.names.append(name)
        self.seen.append((tuple([one if isinstance(one, Tensor) else None for one in args]), output))

    def remove(self) -> None:
        """Remove the hooks that note calls."""
        for handle in self._handles:
            handle.remove()


def show_calls(module: nn.Module, names: Sequence[str], seen: Sequence[Any]) -> None:
    """Show calls of modules inside to the hooks there, as another process has noted them; see `HookedCalls`."""
    for name, (args, output) in zip(names, seen, strict=True):
        show_call(module.get_submodule(name), args, output)
