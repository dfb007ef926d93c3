"""The doors of the spine: what runs when the model calls a module that belongs to a column.

Whoever runs the model in a thread visits its doors: a frame of a mini-batch, a recomputation at backward, or a run in
one piece. The visitor imports the arguments into the column of the module; then the door calls the module, whose hooks,
compiled code and checkpointing are behind the door. Without a visitor, as in a method of the model beside forward, the
pipeline copies them there, and copies back what the module returns.

A door takes the place of the module's own call. A copy or a pickle of the model has no doors until it runs, whatever a
module puts into its state: a copied door would lead to the module of the original.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.devices.torch_internals import is_optimized, own_call, plain_call, replace_call
from torchgpipe.model.values import Exchanged
from torchgpipe.spine.recomputed import Again, Keep, Recomputation

__all__ = ["Door", "Owner", "Visitor", "has_compiled_code", "put_door", "remove_door", "this_thread", "visiting"]


class Visitor(Protocol):
    """Whoever runs the model in a thread.

    Attributes:
        owner: the identity of the pipeline of the model; the doors of other pipelines do not ask this visitor
    """

    owner: Owner

    def visit(self, door: Door, args: Any, kwargs: Any) -> Any:
        """Import the arguments into the column of ``door``, and return what the module behind it returns."""


#: The identity of a pipeline, for what its model holds: weakly, as its loss function may hold the model, and a cycle
#: would keep the model alive. What is called outside of its runs, the pipeline calls: see `Pipeline.call_outside`.
Owner: TypeAlias = weakref.ref[Any]


class _ThisThread(threading.local):
    visitor: Visitor | None = None


#: The visitor of this thread.
this_thread = _ThisThread()


@contextmanager
def visiting(visitor: Visitor) -> Iterator[None]:
    """Visit the doors that this thread reaches in a ``with`` block."""
    outer, this_thread.visitor = this_thread.visitor, visitor
    try:
        yield
    finally:
        this_thread.visitor = outer


class Door:
    """The way into a module of the spine.

    Args:
        module: the module
        name: its name in the model
        column: its column
        recomputes: whether the module keeps only its inputs, and runs again at backward
        owner: the identity of the pipeline

    Attributes:
        name: the name of the module
        column: the column of the module
        recomputes: whether the module keeps only its inputs, and runs again at backward
        owner: the identity of the pipeline
        layers: the numbers of the layers of a cache that the module uses, as transformers numbers them
    """

    __slots__ = ("_behind", "_module", "column", "layers", "name", "owner", "recomputes")

    def __init__(self, module: nn.Module, name: str, column: int, *, recomputes: bool, owner: Owner) -> None:
        # Weakly, as the module holds its door.
        self._module = weakref.ref(module)
        self.owner = owner
        self._behind = own_call(module)
        self.name, self.column, self.recomputes = name, column, recomputes
        numbers = [getattr(child, "layer_idx", None) for child in module.modules()]
        self.layers = sorted({number for number in numbers if isinstance(number, int)})

    def __reduce__(self) -> Any:
        """Leave doors out of copies and pickles; an RNN, for one, copies everything that it has."""
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        visitor = this_thread.visitor
        if visitor is not None and visitor.owner is self.owner:
            return visitor.visit(self, args, kwargs)
        pipeline = None if torch.compiler.is_dynamo_compiling() else self.owner()
        return self.call_module(args, kwargs) if pipeline is None else pipeline.call_outside(self, args, kwargs)

    def get_compiler_config(self) -> Any:
        """Return what the module was compiled with, as compiled code does; None if it was not compiled."""
        return getattr(self._behind, "get_compiler_config", lambda: None)()

    def call_module(
        self, args: Any, kwargs: Any, keep: Keep | None = None, again: Again | None = None, *, recomputes: bool = True
    ) -> Any:
        """Call the module.

        Args:
            args: its arguments
            kwargs: its arguments with names
            keep: returns what to keep of an argument, if the module runs again at backward
            again: takes what begins the second run before backward does
            recomputes: whether this call may run again
        """
        if self.recomputes and recomputes and self.module.training and torch.is_grad_enabled():
            return Recomputation(self.module, self.name, self._call).first(args, kwargs, keep, again)
        return self._call(*args, **kwargs)

    def call_exchanged(self, args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Call the module with ``change(tensor)`` in the place of every tensor among its arguments."""
        exchanged = Exchanged(args, kwargs, change)
        output = self.call_module(exchanged.args, exchanged.kwargs)
        exchanged.hand_over()
        return output

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return (self._behind or plain_call(self.module))(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The module behind the door."""
        module = self._module()
        assert module is not None, "a module is called, so it is there"
        return module

    def remove(self) -> None:
        """Give the module its own call back."""
        replace_call(self.module, self._behind)


def put_door(module: nn.Module, name: str, column: int, *, recomputes: bool, owner: Owner) -> None:
    """Put a door in front of ``module``, unless it is there; another one is removed, and compiled code is behind it."""
    door: Any = own_call(module)
    if isinstance(door, Door):
        if (door.name, door.column, door.recomputes) == (name, column, recomputes) and door.owner is owner:
            return
        door.remove()
    replace_call(module, Door(module, name, column, recomputes=recomputes, owner=owner))


def has_compiled_code(module: nn.Module) -> bool:
    """Return whether calling ``module`` runs compiled code, in front of which there may be a door."""
    call: Any = own_call(module)
    return (call._behind if isinstance(call, Door) else call) is not None or is_optimized(module)


def remove_door(module: nn.Module, owner: Owner | None = None) -> None:
    """Remove the door of ``module``, if it has one: that of ``owner``, or that of any pipeline."""
    door: Any = own_call(module)
    if isinstance(door, Door) and owner in (None, door.owner):
        door.remove()
