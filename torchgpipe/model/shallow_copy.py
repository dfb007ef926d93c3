"""A module of another class that is the same module in all other respects: for what a wrapper has to run differently.

The caller's module is not changed by that, and nothing is copied: each sees what is trained, tracked, replaced or
hooked through the other.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

__all__ = ["twin"]

M = TypeVar("M", bound=nn.Module)


def twin(module: nn.Module, its_type: type[M]) -> M:
    """Another module with the attributes of ``module``: the very dicts of parameters, buffers, children and hooks."""
    double = object.__new__(its_type)
    vars(double).update(vars(module))
    vars(double).pop("_compiled_call_impl", None)  # It calls the other one.
    return double
