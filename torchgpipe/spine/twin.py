"""The twin of a module that is called again in a later column: the same module there, on that column's weights.

    column 0     embed ──► blocks.0 ──► ...
    column 3                            ... ──► head ──► twin of embed ──► predict ──► twin of head

A twin is what people make by hand when they tie two modules. It has parameters, constants and inner modules of its own
column, and shares all else with the module, such as hooks; compiled code is left out, as it may be bound to the module.
A twin belongs to a mini-batch, which sums the gradients of all aliases of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from torchgpipe.devices.torch_internals import is_saved, own_call
from torchgpipe.gradients.aliases import Aliases
from torchgpipe.model.shallow_copy import shallow_copy
from torchgpipe.model.values import mapped
from torchgpipe.spine.door import Door, put_door

__all__ = ["may_have_twin", "twin_of"]


def may_have_twin(module: nn.Module) -> bool:
    """Return whether nothing of a module would be missing in a twin, as far as the module itself tells."""
    children = list(module.modules())
    # Perhaps running statistics.
    saved = [is_saved(child, name) for child in children for name, value in child._buffers.items() if value is not None]
    attributes = [pair for child in children for pair in vars(child).items()]
    # Bound to the module, such as a forward that a library has put there.
    bound = [name == "forward" or isinstance(value, MethodType) for name, value in attributes]
    return not any(saved + bound)


def twin_of(module: nn.Module, column: int, aliases: Aliases, copied: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return the twin of a module, with a door wherever the module has one.

    Args:
        module: the module, which has a door
        column: the column of the twin
        aliases: the aliases of the model's parameters
        copied: returns a buffer in the memory of the column
    """
    twins = {child: shallow_copy(child, type(child)) for child in module.modules()}
    there: dict[str, Callable[[Any], Any]] = {
        "_parameters": lambda parameter: aliases.make(parameter, column),
        "_buffers": copied,
        "_modules": twins.__getitem__,
    }

    def stands_in(tensor: Tensor) -> Tensor:
        alias = aliases.at(tensor, column)
        return tensor if alias is None else alias

    for child, twin in twins.items():
        for kind, get in there.items():
            own = vars(child)[kind].items()
            vars(twin)[kind] = {name: None if value is None else get(value) for name, value in own}
        # An RNN, for one, keeps another list of its parameters.
        lists = {name: value for name, value in vars(child).items() if type(value) is list}
        vars(twin).update({name: mapped(value, stands_in) for name, value in lists.items()})
        door = own_call(child)
        if isinstance(door, Door):
            put_door(twin, door.name, column, recomputes=door.recomputes, owner=door.owner)
    return twins[module]
