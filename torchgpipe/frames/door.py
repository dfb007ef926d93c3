"""The doors of the spine: what runs when the model calls a module that belongs to a column.

Whoever runs the model in a thread visits its doors: a frame of a mini-batch, a recomputation at backward, or a run in
one piece. The visitor brings the arguments to the column of the module; then the door calls the module, whose hooks,
compiled code and checkpointing are behind the door. Without a visitor a door is open.

A door takes the place of the module's own call. So a copy or a pickle of the model has no doors, until it runs.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchgpipe.devices.torch_internals import own_call, plain_call, replace_call

__all__ = ["Door", "Visitor", "close_door", "here", "open_door"]


class Visitor(Protocol):
    """Whoever runs the model in a thread."""

    def visit(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Bring the arguments to the column of ``door``, and return what the module behind it returns."""


class _Here(threading.local):
    visitor: Visitor | None = None


#: The visitor of this thread.
here = _Here()


class Door:
    """The way into a module of the spine.

    Args:
        module: the module
        name: its name in the model
        column: its column
        recomputes: whether the module keeps only its inputs, and runs again at backward

    Attributes:
        name: the name of the module
        column: the column of the module
        layers: the numbers of the layers of a cache that the module uses, as transformers numbers them
    """

    __slots__ = ("_behind", "_module", "column", "layers", "name", "recomputes")

    def __init__(self, module: nn.Module, name: str, column: int, *, recomputes: bool) -> None:
        self._module = module
        self._behind = own_call(module)
        self.name, self.column, self.recomputes = name, column, recomputes
        numbers = [getattr(one, "layer_idx", None) for one in module.modules()]
        self.layers = sorted({number for number in numbers if isinstance(number, int)})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        visitor = here.visitor
        return self.enter(args, kwargs) if visitor is None else visitor.visit(self, args, kwargs)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Call the module."""
        if self.recomputes and self._module.training and torch.is_grad_enabled():
            return checkpoint(self._call, *args, use_reentrant=False, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return (self._behind or plain_call(self._module))(*args, **kwargs)

    def close(self) -> None:
        """Give the module its own call back."""
        replace_call(self._module, self._behind)


def open_door(module: nn.Module, name: str, column: int, *, recomputes: bool) -> None:
    """Let calls of ``module`` go through a door, which is renewed if it is another one, or covered by compiled code."""
    door: Any = own_call(module)
    if isinstance(door, Door):
        if (door.name, door.column, door.recomputes) == (name, column, recomputes):
            return
        door.close()
    replace_call(module, Door(module, name, column, recomputes=recomputes))


def close_door(module: nn.Module) -> None:
    """Remove the door of ``module``, if it has one."""
    door: Any = own_call(module)
    if isinstance(door, Door):
        door.close()
