"""Leave the graph that `torch.compile` traces, for functions that the compiler must not trace.

The decorator `torch.compiler.disable` imports the compiler, which takes longer than all other imports together, and
wraps every call. So this file is imported only while the compiler traces::

    if torch.compiler.is_dynamo_compiling():
        from torchgpipe.devices.uncompiled import uncompiled

        return uncompiled(function, x)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["uncompiled"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` without compiling it, or any function that it calls."""
    return function(*args, **kwargs)
