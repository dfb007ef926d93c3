"""The calls inside of a module that hooks see: libraries collect hidden states and the logits of routers in this way.

What a hook keeps may be used between two modules of the spine, so every process must come to have something to keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchgpipe.devices.torch_internals import forward_hooks, show_call

__all__ = ["hooked_calls", "show_calls"]


@contextmanager
def hooked_calls(module: nn.Module, *, is_needed: bool) -> Iterator[tuple[list[str], list[Any]]]:
    """Note the calls of the modules inside of a module behind whose forward there are hooks, in a ``with`` block.

    Args:
        module: the module
        is_needed: whether there may be any

    Yields:
        the names of the modules, in the order of their calls; and of each call, the positional arguments, as far as
        they are tensors, and the output
    """
    names, seen = list[str](), list[Any]()

    def note(name: str, _child: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        names.append(name)
        seen.append((tuple([one if isinstance(one, Tensor) else None for one in args]), output))

    with ExitStack() as handles:
        for name, child in module.named_modules() if is_needed else ():
            if forward_hooks(child)[1]:
                handles.callback(child.register_forward_hook(partial(note, name)).remove)
        yield names, seen


def show_calls(module: nn.Module, names: Sequence[str], seen: Sequence[Any]) -> None:
    """Show calls of modules inside to the hooks there, as another process has noted them; see `hooked_calls`."""
    for name, (args, output) in zip(names, seen, strict=True):
        show_call(module.get_submodule(name), args, output)
