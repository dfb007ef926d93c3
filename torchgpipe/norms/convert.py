"""Replace modules deep inside a module, without changing that module."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from torchgpipe.devices.torch_internals import is_optimized
from torchgpipe.model.shallow_copy import shallow_copy

__all__ = ["convert"]


def convert(
    module: nn.Module, replace: Callable[[nn.Module], nn.Module], done: dict[nn.Module, nn.Module] | None = None
) -> nn.Module:
    """Return ``module``, or a shallow copy of it if a module inside is replaced.

    Args:
        module: is not changed
        replace: from each module to its replacement, or to the same module; the replacement gets converted children
        done: the results so far, so that a module in several places is converted once

    Raises:
        ValueError: a module is to be replaced inside one that ``torch.compile()`` has returned.
    """
    done = {} if done is None else done
    if module not in done:
        before: dict[str, nn.Module | None] = module._modules
        after = {name: child if child is None else convert(child, replace, done) for name, child in before.items()}
        result = replace(module)
        if result is module and any(after[name] is not child for name, child in before.items()):
            if is_optimized(module):
                raise ValueError(
                    "batch norms cannot be exchanged within what torch.compile() has returned, which would go on "
                    "calling the old ones; compile in place and afterwards: GPipe(...).compile() or layer.compile()"
                )
            result = shallow_copy(module, type(module))
        if result is not module:
            vars(result)["_modules"] = after
        done[module] = result
    return done[module]
