"""The way out of what `torch.compile` traces, for what has to run as it is written.

`torch.compiler.disable` as a decorator does the same, but it brings the compiler along, whose import takes longer than
all the rest, and puts a wrapper around every call. So this file is imported only where the compiler is at work::

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
    """What ``function`` returns for the arguments, without the compiler in it and in all that it calls."""
    return function(*args, **kwargs)
