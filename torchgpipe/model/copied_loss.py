"""Copies of a loss function with all of its state, so that a further call leaves no trace in the user's own.

`copy.deepcopy` takes a function for a constant. But a function may keep something in a closure, or in a global of its
module. So a function is made anew, with copies of what its code names. Parameters are not copied: a call changes none.
"""

from __future__ import annotations

import copy
import dis
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from torchgpipe.devices.torch_internals import forward_hooks

__all__ = ["copied_loss"]

#: Where code is that keeps no state of a loss: Python's own, and what is installed.
_LIBRARIES = tuple([sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")])


def copied_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy; modules in it have no hooks.

    Raises:
        Exception: an attribute or a closure cannot be copied, such as a tensor with a graph; a global is shared then.
    """
    return _copied(loss_fn, {})  # type: ignore[no-any-return]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a value, given copies by the ids of their originals, as `copy.deepcopy` has them."""
    if isinstance(value, (type, ModuleType, torch.jit.ScriptFunction)) or id(value) in memo:
        return memo.get(id(value), value)
    if isinstance(value, partial):
        keywords = {name: _copied(item, memo) for name, item in value.keywords.items()}
        return partial(_copied(value.func, memo), *[_copied(item, memo) for item in value.args], **keywords)
    if isinstance(value, MethodType):
        return MethodType(_copied(value.__func__, memo), _copied(value.__self__, memo))
    if isinstance(value, FunctionType):
        return value if value.__code__.co_filename.startswith(_LIBRARIES) else _copied_function(value, memo)
    return _copied_object(value, memo)


def _copied_object(value: Any, memo: dict[int, Any]) -> Any:
    modules = isinstance(value, nn.Module)
    if modules:
        memo.update({id(parameter): parameter for parameter in value.parameters()})
    made = copy.deepcopy(value, memo)
    for child in made.modules() if modules else ():
        for hooks in forward_hooks(child):
            hooks.clear()
    kind: Any = type(value)
    of_library = kind.__module__.partition(".")[0] in ("builtins", "torch", "torchgpipe")
    if made is not value and not of_library and hasattr(value, "__dict__"):
        # What its methods name is copied, too.
        methods = {name: method for base in reversed(kind.__mro__) for name, method in vars(base).items()}
        own = {name: _copied(method, memo) for name, method in methods.items() if isinstance(method, FunctionType)}
        object.__setattr__(made, "__class__", type(kind.__name__, (kind,), own))  # It may be frozen.
    return made


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    # Functions of one module share its globals, and functions made in one call their cells.
    known = memo.setdefault(id(function.__globals__), dict(function.__globals__))
    cells = tuple([_copied_cell(cell, memo) for cell in function.__closure__ or ()])
    made = FunctionType(function.__code__, known, function.__name__, None, cells)
    memo[id(function)] = made
    made.__defaults__, made.__kwdefaults__ = copy.deepcopy((function.__defaults__, function.__kwdefaults__), memo)
    made.__dict__.update(copy.deepcopy(function.__dict__, memo))
    for name in {*_globals_of(function.__code__)} & known.keys():
        with suppress(Exception):  # Methods that are not called may name anything, such as a library of operators.
            known[name] = _copied(function.__globals__[name], memo)
    return made


def _copied_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    if id(cell) not in memo:
        made = memo[id(cell)] = CellType()  # First, as a function may be in a cell of its own.
        with suppress(ValueError):  # There is nothing in it yet.
            made.cell_contents = _copied(cell.cell_contents, memo)
    found: CellType = memo[id(cell)]
    return found


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the names of the globals that code reads, functions within it included."""
    yield from [str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)
