"""Copies of a loss function with its state, so that a further call leaves no trace in the user's own.

`copy.deepcopy` takes a function for a constant. But a function may keep something in a closure, or in a global of its
module, so it is made anew, with copies of both. Parameters of modules are not copied: a call changes none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from torchgpipe.devices.torch_internals import forward_hooks

__all__ = ["copied_loss"]


def copied_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy; modules in it have no hooks.

    Raises:
        Exception: an attribute or a closure cannot be copied, such as a tensor with a graph; a global is shared then.
    """
    memo: dict[int, Any] = {}
    made = _copied(loss_fn, memo)
    for module in [one for one in memo.values() if isinstance(one, nn.Module)]:
        for hooks in forward_hooks(module):
            hooks.clear()
    return made  # type: ignore[no-any-return]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a value, given copies by the ids of their originals, as `copy.deepcopy` has them."""
    if isinstance(value, partial):
        keywords = {name: _copied(item, memo) for name, item in value.keywords.items()}
        return partial(_copied(value.func, memo), *[_copied(item, memo) for item in value.args], **keywords)
    if isinstance(value, FunctionType):
        return memo.get(id(value)) or _copied_function(value, memo)
    owner = getattr(value, "__self__", value)  # of a method
    if isinstance(owner, nn.Module):
        memo.update({id(parameter): parameter for parameter in owner.parameters()})
    return copy.deepcopy(value, memo)


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    # Functions of one module share its globals, and functions made in one call their cells.
    own = function.__globals__
    known = memo.setdefault(id(own), dict(own))
    cells = tuple([_copied_cell(cell, memo) for cell in function.__closure__ or ()])
    made = memo[id(function)] = FunctionType(function.__code__, known, function.__name__, None, cells)
    settings = function.__defaults__, function.__kwdefaults__, function.__dict__
    made.__defaults__, made.__kwdefaults__, made.__dict__ = copy.deepcopy(settings, memo)
    for name in _names_in(function.__code__) & own.keys():
        # A function of another module, such as a library's, is shared, and so is what cannot be copied.
        if not isinstance(own[name], FunctionType) or own[name].__globals__ is own:
            with suppress(Exception):
                known[name] = _copied(own[name], memo)
    return made


def _copied_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    if id(cell) not in memo:
        made = memo[id(cell)] = CellType()  # First, as a function may be in a cell of its own.
        with suppress(ValueError):  # There is nothing in it yet.
            made.cell_contents = _copied(cell.cell_contents, memo)
    found: CellType = memo[id(cell)]
    return found


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code reads, functions within it included."""
    return {*code.co_names}.union(*[_names_in(one) for one in code.co_consts if isinstance(one, CodeType)])
