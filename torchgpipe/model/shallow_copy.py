"""Copy a module shallowly under another class, so that a wrapper can run it differently.

The caller's module stays as it is. All state stays shared: what is trained, tracked, replaced or hooked through one of
the two modules is seen through the other.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from torchgpipe.devices.torch_internals import replace_call

__all__ = ["shallow_copy"]

M = TypeVar("M", bound=nn.Module)


def shallow_copy(module: nn.Module, kind: type[M]) -> M:
    """Return a module of class ``kind`` that has the very parameters, buffers, children and hooks of ``module``."""
    copy = object.__new__(kind)
    vars(copy).update(vars(module))
    replace_call(copy, None)  # What takes the place of the call is bound to `module`, and would run that.
    return copy
